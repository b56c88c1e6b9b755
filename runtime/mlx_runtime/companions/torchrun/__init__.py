"""Several machines without a cluster: processes that torchrun or srun starts train as the workers of a run."""
