"""Predictions for datasets and files: blocks of rows, in order, that survive an interruption."""
