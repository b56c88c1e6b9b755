"""Launched jobs, and runs after them; data jobs, which fill a folder of the storage completely or not at all."""
