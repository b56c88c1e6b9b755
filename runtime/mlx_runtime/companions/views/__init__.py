"""Pages and comparisons: reports of runs, and the differences between two."""
