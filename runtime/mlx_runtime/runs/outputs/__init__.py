"""Folders with the outputs of jobs and runs: filled whole or not at all, measured, and removed."""
