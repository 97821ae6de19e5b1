"""Models by hub id, where a hub can be reached or has been reached before."""

from __future__ import annotations

import re
from pathlib import Path

from labkit.checkpoints.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json",
          "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


def is_hub_id(name: str) -> bool:
    """Tell whether `name` looks like `owner/model`."""
    return _ID.fullmatch(name) is not None


def download(name: str) -> Path:
    """Return the folder of a hub model, from the hub's own cache or by download.

    Args:
        name: `owner/model`.

    Raises:
        CheckpointError: no such model, no permission, or no way to the hub; the message says which.
    """
    # Imported here: it is slow to import and not needed for the bundled model.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns="*/*"))
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is not a valid hub id ({error}); check the spelling, "
                              f"or use 'smollm2'") from error
    except GatedRepoError as error:
        raise CheckpointError(f"{name} is gated; accept its licence on the hub and log in with `hf auth login`, "
                              f"or use 'smollm2'") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"the hub has no model {name!r} that you may read; check the spelling, "
                              f"or use 'smollm2'") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{name} is not in the local hub cache and the hub cannot be reached; connect to the "
                              f"network, give a local folder or .gguf file, or use 'smollm2'") from error
