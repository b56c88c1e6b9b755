"""Questions about runs: listing, lookup, the best one, and reading one from Python."""
