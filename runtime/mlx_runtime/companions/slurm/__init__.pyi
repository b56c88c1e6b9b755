# Written by runtime/stubs.py.
from mlx_runtime.companions.slurm.queue import Queue as Queue
from mlx_runtime.companions.slurm.queue import job_statuses as job_statuses
