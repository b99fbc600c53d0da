"""Pre-training: one Hugging Face model with one position encoding, on text, so that any stop loses nothing."""
