# Written by runtime/stubs.py.
from mlx_runtime.companions.sweeps.api import kfold as kfold
from mlx_runtime.companions.sweeps.api import sweep as sweep
from mlx_runtime.companions.sweeps.report import push as push
from mlx_runtime.companions.sweeps.report import render_sweep as render_sweep
from mlx_runtime.companions.sweeps.results import SweepResult as SweepResult
from mlx_runtime.companions.sweeps.results import open_sweep as open_sweep
from mlx_runtime.companions.sweeps.trial import BEGUN as BEGUN
from mlx_runtime.companions.sweeps.trial import TrialJob as TrialJob
from mlx_runtime.companions.sweeps.trial import record_end as record_end
from mlx_runtime.companions.sweeps.trial import run_trial as run_trial
