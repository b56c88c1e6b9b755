"""Mirrors of runs on the Hugging Face Hub: uploaded while they train, read back, and continued on another machine."""
