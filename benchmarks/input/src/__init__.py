"""An experiment that only measures how fast its datasets are read."""
