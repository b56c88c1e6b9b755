"""Weights from elsewhere, and what trains of a model; proofs of exact resume, and upgrades to a new template."""
