"""Training the heads of lab 14 for a real model, on text that it writes itself and text that every machine has."""
