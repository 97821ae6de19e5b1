"""The reference for lab 14: speculative decoding."""
