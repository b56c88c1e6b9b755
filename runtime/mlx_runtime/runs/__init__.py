"""Runs on disk: folders, records, checkpoints, states of metrics and logs, and queries over them."""
