"""Other trackers: MLflow, Weights & Biases, and CSV files."""
