"""Experiments in JAX: models of Flax NNX, a mesh of devices, and their checkpoints."""
