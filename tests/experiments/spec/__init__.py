"""The example that the design of this library started from: one trained model, one that is not, many of the rest."""
