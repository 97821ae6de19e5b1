"""The heads that come with the workbook: drafters trained for the bundled model, in four bits."""

from labkit.trained_heads.draft_model import DraftModel
from labkit.trained_heads.loading import HEADS, TrainedHead, head_file, load_head, read_card, save_head

__all__ = ["HEADS", "DraftModel", "TrainedHead", "head_file", "load_head", "read_card", "save_head"]
