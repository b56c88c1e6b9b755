"""Many runs of one experiment: the trials of a sweep, the choice of the next run, and their results."""
