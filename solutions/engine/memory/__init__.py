"""What layers keep of their tokens: pools of blocks, and how numbers are stored in them."""
