"""Slurm: runs and sweeps as batch jobs; on several nodes, workers are tasks, and sweeps have a Ray of their own."""
