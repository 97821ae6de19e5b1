"""The error of everything that can go wrong between a model's name and its weights."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A model cannot be found, read or used; the message says what was given and what to do."""
