"""Folders with the outputs of jobs and runs: filled whole or not at all, measured, and removed."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    filling="RECORD Filling Output refuse_present",
    jobs="find_job jobs_root list_jobs",
    inputs="INPUTS keep_input remove_unused_inputs",
    removal="plan_run refuse_in_use remove remove_run",
    usage="READ_MARK Survey is_read_mark survey",
)
