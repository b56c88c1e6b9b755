"""An experiment that writes down what it sees: rows, devices, weights, by rank. Several of everything."""
