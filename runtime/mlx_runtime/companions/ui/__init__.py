"""A page in the browser about all runs, and the tables of runs and metrics that it and notebooks show."""
