"""Commands that answer with trained models."""
