"""Exports: a program and its weights in a folder that needs nothing of this package, and the proof of its outputs."""
