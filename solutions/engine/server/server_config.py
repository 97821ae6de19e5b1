"""What a server allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerConfig:
    """What the server allows.

    Args:
        model_name: as clients call the model.
        api_key: what they must show; None for nothing.
        max_body_bytes: of a request.
        max_concurrent: requests at once; more are answered with 429.
        patience: seconds that a shutdown gives to what is being served.
    """

    model_name: str = "smollm2"
    api_key: str | None = None
    max_body_bytes: int = 1_000_000
    max_concurrent: int = 256
    patience: float = 10.0
