"""From a model's name to a model that runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.checkpoints import bundled, folder, gguf_file, hub
from labkit.checkpoints.errors import CheckpointError
from labkit.checkpoints.gguf_tokenizer import read_tokenizer
from labkit.config import ModelConfig
from labkit.decoder import Decoder
from labkit.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """A decoder and the tokenizer that belongs to it."""

    decoder: Decoder
    tokenizer: Tokenizer

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""
        return self.decoder.config


def load(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    """Load a model and its tokenizer.

    Args:
        name: `"smollm2"`, the bundled model; the path of a folder in Hugging Face's layout or of a `.gguf` file, which
            is dequantized anew each time; or a hub id `owner/model`.
        dtype: type of weights and activations.
        device: where the weights are put, `"cpu"` or `"cuda"`.

    Raises:
        CheckpointError: the model cannot be found, read or used; the message says why and what to do.
    """
    source = find_model(name)
    return Model(_decoder(source, dtype, device), _tokenizer(source))


def load_decoder(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Load only the decoder of a model; arguments and errors as in `load`."""
    return _decoder(find_model(name), dtype, device)


def load_tokenizer(name: str) -> Tokenizer:
    """Load only the tokenizer of a model, which takes well under a second; errors as in `load`."""
    return _tokenizer(find_model(name))


def find_model(name: str) -> Path:
    """Return the folder or `.gguf` file that a name stands for; names and errors as in `load`."""
    if name == bundled.NAME:
        return bundled.bundled_folder()
    path = Path(name).expanduser()
    if name and (path.suffix == ".gguf" or path.is_dir()):
        return path
    if hub.is_hub_id(name) and not path.exists():
        return hub.download(name)
    raise CheckpointError(f"no model is called {name!r}; give '{bundled.NAME}', a folder in Hugging Face's layout, "
                          f"a .gguf file, or a hub id such as 'Qwen/Qwen2.5-1.5B-Instruct'")


def _decoder(source: Path, dtype: torch.dtype, device: str) -> Decoder:
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise CheckpointError(f"device {device!r} is not available; 'cpu' is, and 'cuda' where torch sees a GPU")
    if source.suffix == ".gguf" and not source.is_dir():
        reader = gguf_file.open_gguf(source)
        config = gguf_file.read_config(reader)
        weights = gguf_file.read_weights(reader, config)
    else:
        config = folder.read_config(source)
        weights = folder.read_weights(source, config)
    try:
        return Decoder(config, {name: weight.to(device) for name, weight in weights.items()}, dtype)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _tokenizer(source: Path) -> Tokenizer:
    if source.suffix == ".gguf" and not source.is_dir():
        return Tokenizer(*read_tokenizer(gguf_file.open_gguf(source)))
    try:
        return Tokenizer.from_folder(source)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error
