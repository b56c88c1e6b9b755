"""Runs on disk: folders, records, checkpoints, metric states and logs, and queries over them."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "drivers logs metric_states records snapshots tables",
    folder=(
        "ATTEMPT EVALUATIONS RUN RUN_NAME SWEEP RunFolder attempt_name claim_run find_run list_runs "
        "list_sweeps named_run names_run read_errors refuse_empty run_folder"
    ),
    remote="RemoteReader RemoteRun",
    uploads="Upload",
    versions="provenance",
)
