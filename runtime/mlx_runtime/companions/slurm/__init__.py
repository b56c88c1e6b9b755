"""Slurm: runs and sweeps as batch jobs, on one node without Ray, on several with a Ray of their own."""
