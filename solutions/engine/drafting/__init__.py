"""Speculation in the continuous batch: who drafts, how much there is room for, and what is kept."""
