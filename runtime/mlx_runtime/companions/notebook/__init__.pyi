# Written by runtime/stubs.py.
from mlx_runtime.companions.notebook.calls import run_settings as run_settings
from mlx_runtime.companions.notebook.function_runs import Trainer as Trainer
from mlx_runtime.companions.notebook.function_runs import reattach as reattach
from mlx_runtime.companions.notebook.functions import FunctionExperiment as FunctionExperiment
from mlx_runtime.companions.notebook.functions import accelerate as accelerate
from mlx_runtime.companions.notebook.functions import get_dataset_shard as get_dataset_shard
from mlx_runtime.companions.notebook.functions import load_checkpoint as load_checkpoint
from mlx_runtime.companions.notebook.functions import load_function as load_function
from mlx_runtime.companions.notebook.functions import local_rank as local_rank
from mlx_runtime.companions.notebook.functions import report as report
from mlx_runtime.companions.notebook.functions import save_checkpoint as save_checkpoint
from mlx_runtime.companions.notebook.functions import world_rank as world_rank
from mlx_runtime.companions.notebook.functions import world_size as world_size
from mlx_runtime.companions.notebook.magic import register as register
from mlx_runtime.companions.notebook.runs import importable as importable
from mlx_runtime.companions.notebook.runs import require_list as require_list
from mlx_runtime.companions.notebook.runs import run as run
