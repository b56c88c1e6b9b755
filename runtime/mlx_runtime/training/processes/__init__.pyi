# Written by runtime/stubs.py.
from mlx_runtime.training.processes.background import RunJob as RunJob
from mlx_runtime.training.processes.background import conf_of as conf_of
from mlx_runtime.training.processes.background import load_bound_config as load_bound_config
from mlx_runtime.training.processes.background import work as work
from mlx_runtime.training.processes.children import die_with_parent as die_with_parent
from mlx_runtime.training.processes.children import exit_reason as exit_reason
from mlx_runtime.training.processes.children import memory_kills as memory_kills
from mlx_runtime.training.processes.children import unsafe_to_fork as unsafe_to_fork
from mlx_runtime.training.processes.fork_server import ForkServer as ForkServer
from mlx_runtime.training.processes.links import PRUNE as PRUNE
from mlx_runtime.training.processes.links import Link as Link
from mlx_runtime.training.processes.links import RunProcess as RunProcess
from mlx_runtime.training.processes.standby import get_server as get_server
