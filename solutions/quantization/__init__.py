"""The reference for lab 13: quantization, from the formula to a checkpoint that real engines load."""
