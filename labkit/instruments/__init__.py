"""What a laptop cannot time, it can count: bytes, launches, stray accesses and operators of lab code."""
