"""Proofs on the user's own code: exact resuming, and equal results with any number of workers."""
