"""Models on disk: the bundled one, GGUF files, Hugging Face folders and hub ids."""

from labkit.checkpoints.bundled import bundled_folder, bundled_gguf, fetch
from labkit.checkpoints.errors import CheckpointError
from labkit.checkpoints.loading import Model, find_model, load, load_decoder, load_tokenizer

__all__ = ["CheckpointError", "Model", "bundled_folder", "bundled_gguf", "fetch", "find_model", "load",
           "load_decoder", "load_tokenizer"]
