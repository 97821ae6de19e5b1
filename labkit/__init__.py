"""What the code of a lab may use: models, tokenizers, protocols and instruments."""
