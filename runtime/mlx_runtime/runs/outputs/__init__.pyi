# Written by runtime/stubs.py.
from mlx_runtime.runs.outputs.filling import Filling as Filling
from mlx_runtime.runs.outputs.filling import Output as Output
from mlx_runtime.runs.outputs.filling import refuse_present as refuse_present
from mlx_runtime.runs.outputs.jobs import find_job as find_job
from mlx_runtime.runs.outputs.jobs import jobs_root as jobs_root
from mlx_runtime.runs.outputs.jobs import list_jobs as list_jobs
from mlx_runtime.runs.outputs.inputs import INPUTS as INPUTS
from mlx_runtime.runs.outputs.inputs import keep_input as keep_input
from mlx_runtime.runs.outputs.inputs import remove_unused_inputs as remove_unused_inputs
from mlx_runtime.runs.outputs.removal import plan_run as plan_run
from mlx_runtime.runs.outputs.removal import refuse_in_use as refuse_in_use
from mlx_runtime.runs.outputs.removal import remove as remove
from mlx_runtime.runs.outputs.removal import remove_run as remove_run
from mlx_runtime.runs.outputs.usage import READ_MARK as READ_MARK
from mlx_runtime.runs.outputs.usage import Survey as Survey
from mlx_runtime.runs.outputs.usage import is_read_mark as is_read_mark
from mlx_runtime.runs.outputs.usage import survey as survey
