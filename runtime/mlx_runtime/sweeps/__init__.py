"""Many runs of one experiment: the trials of a sweep, what runs next, and what has come of them."""
