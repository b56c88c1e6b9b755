"""Answers of a trained model: predictions for datasets and files, exports, and servers."""
