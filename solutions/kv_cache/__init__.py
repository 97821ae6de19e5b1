"""Lab 07, the KV cache: sizing, storage, attention over cached keys, the generation loop and sampling."""
