"""Capacity planning: what a model on a machine can do, in arithmetic that fits on an envelope."""
