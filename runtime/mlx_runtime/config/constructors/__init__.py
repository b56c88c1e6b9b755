"""Classes and functions of the code: their paths, signatures and declared calls."""
