"""Model families, each over packed tokens: no padding, attention supplied by the caller."""
