"""Runs on disk: folders, records, checkpoints, metric states and logs, and queries over them."""
