"""An experiment with several parts of each kind, which writes down rows, devices and weights by rank."""
