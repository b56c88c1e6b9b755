"""Where the runs of a sweep train: in processes of this machine, or on a cluster."""
