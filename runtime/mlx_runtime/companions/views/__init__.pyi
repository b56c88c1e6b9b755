# Written by runtime/stubs.py.
from mlx_runtime.companions.views.report import OF_TRAINING as OF_TRAINING
from mlx_runtime.companions.views.report import escape as escape
from mlx_runtime.companions.views.report import known_facts as known_facts
from mlx_runtime.companions.views.report import read_curves as read_curves
from mlx_runtime.companions.views.report import render as render
from mlx_runtime.companions.views.report import render_runs as render_runs
from mlx_runtime.companions.views.report import write as write
