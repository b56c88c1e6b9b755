# Written by runtime/stubs.py.
from mlx_runtime.training.engines.base import Cluster as Cluster
from mlx_runtime.training.engines.base import Handle as Handle
from mlx_runtime.training.engines.base import Job as Job
from mlx_runtime.training.engines.base import StopAsked as StopAsked
from mlx_runtime.training.engines.base import backend_of as backend_of
from mlx_runtime.training.engines.base import lost as lost
from mlx_runtime.training.engines.local import cool_down as cool_down
from mlx_runtime.training.engines.local import warm_up as warm_up
from mlx_runtime.training.engines.placement import JOB_FLAG as JOB_FLAG
from mlx_runtime.training.engines.placement import changing_size as changing_size
from mlx_runtime.training.engines.placement import check_room as check_room
from mlx_runtime.training.engines.placement import engine_class as engine_class
from mlx_runtime.training.engines.placement import engine_for as engine_for
from mlx_runtime.training.engines.placement import errors_of as errors_of
from mlx_runtime.training.engines.placement import shortage as shortage
from mlx_runtime.training.engines.placement import this_machine as this_machine
from mlx_runtime.training.engines.placement import uses_gpus as uses_gpus
from mlx_runtime.training.engines.protocol import Engine as Engine
from mlx_runtime.training.engines.protocol import EngineClass as EngineClass
from mlx_runtime.training.engines.protocol import Group as Group
from mlx_runtime.training.engines.scratch import Scratch as Scratch
ENGINES: dict[str, str]
