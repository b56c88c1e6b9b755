"""Trackers of services: MLflow, and Weights & Biases."""
