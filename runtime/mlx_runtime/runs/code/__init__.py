"""The code of a run: snapshots and uploads of its project, and where it came from."""
