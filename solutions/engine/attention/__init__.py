"""Attention over paged keys and values, one way for each kind of step and of memory."""
