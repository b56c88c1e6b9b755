"""An experiment with a trained model, a frozen one, and several datasets, losses, metrics and tools."""
