"""Kernels that only the engine needs, each with a plain torch twin; the others are lab 06's."""
