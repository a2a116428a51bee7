"""Generation of text and evaluation with trained models."""
