"""Weights from elsewhere, and which parameters train; proofs of exact resume, and upgrades to a new template."""
