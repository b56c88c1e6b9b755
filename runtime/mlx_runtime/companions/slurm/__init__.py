"""Slurm: runs and sweeps as batch jobs, on one node without Ray, on several with a Ray of their own."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(__name__, "commands launch", queue="Queue job_statuses")
