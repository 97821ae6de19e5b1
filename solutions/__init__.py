"""The reference: one package per lab, and the engine built on them."""
