"""Runs on disk: folders, records, checkpoints and logs, and queries over them."""
