"""Many runs of one experiment: the trials of a sweep, the choice of the next run, and their results."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "commands folds",
    api="kfold sweep",
    report="push render_sweep",
    results="SweepResult open_sweep",
    trial="BEGUN TrialJob record_end run_trial",
)
