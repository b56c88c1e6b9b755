"""Runs from Python: `run`, functions of a `Trainer`, actors, and cells of notebooks."""
