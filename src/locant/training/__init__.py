"""Thin functions that build a Hugging Face Trainer, one file for each objective."""
