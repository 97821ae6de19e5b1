"""Decode steps of fixed shapes: padded, then recorded as CUDA graphs or compiled."""
