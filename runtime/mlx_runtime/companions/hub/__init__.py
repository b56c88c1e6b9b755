"""Mirrors of runs on the Hugging Face Hub, which other machines read and continue, and pretrained models."""
