"""The script of a job: it runs the driver of a run, and puts the job back into the queue when its time is up."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

WARNING_S = 60
"""Time for a checkpoint before the job's time is up. Slurm may send the signal a minute earlier, but not later."""

HEAD = """\
#!/bin/bash
{directives}
# Written by mlx train launch --slurm. The options of sbatch and the variables SBATCH_* override these lines.
run={run}
job={folder}
python={python}
export {variables}
cd "$job/code" || exit  # a copy of the code, made when the job was submitted
"""

RAY = """
# One Ray node per node of the allocation, for this job alone. They end with the step.
export MLX_IN_JOB=alone
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$("$python" -c "import secrets; print(secrets.token_hex(32))")
address=$job/ray-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\
  --output="$address-%n.log" "$python" -m mlx_runtime.companions.slurm.nodes "$address" &
ray=$!
trap 'scancel --signal=TERM $SLURM_JOB_ID.0; wait $ray' EXIT
until [ -s "$address" ]; do
  kill -0 $ray || {{ cat "$address"-*.log; echo "error: Ray did not start on all nodes"; exit 1; }}
  sleep 0.2
done
export RAY_ADDRESS=$(cat "$address")
"""

WORKERS = """
# One task per worker, as under torchrun. They meet at this node, and the first one drives the run.
export MASTER_ADDR=$(scontrol show node "$SLURMD_NODENAME" | sed -n "s/.*NodeAddr=\\([^ ]*\\).*/\\1/p")
export MASTER_PORT=$("$python" -c "import socket; print(socket.create_server(('', 0)).getsockname()[1])")
export WORLD_SIZE=$((SLURM_JOB_NUM_NODES * {tasks})) LOCAL_WORLD_SIZE={tasks}
"""

START = """
"$python" -u {command} &
"""

START_WORKERS = """
srun --ntasks="$WORLD_SIZE" --ntasks-per-node={tasks} --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c \\
  'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' worker "$python" -u {command} &
"""

DRIVER = """\
driver=$!
trap 'signaled=1 over=1; {stop}' USR1  # from --signal: the time is almost up, so save a checkpoint
trap 'signaled=1' TERM  # from scancel, which sends it to the driver, too
signaled=1
while [ $signaled ]; do signaled=; wait $driver; code=$?; done

if [ $over ] && [ $code = 143 ]; then
  "$python" -m mlx_runtime.companions.slurm.requeue "$run" && sleep 60  # until Slurm ends this attempt
fi
exit $code
"""


def write(
    *,
    run: str,
    folder: Path,
    nodes: int,
    tasks: int,
    sweep: bool,
    options: Mapping[str, str | int | None],
    words: Sequence[str],
    command: Sequence[str],
    variables: Mapping[str, str],
) -> str:
    """Return the script of a job.

    Args:
        run: folder of the run.
        folder: folder of the job's files: `code`, and the addresses and logs of Ray.
        nodes: number of nodes.
        tasks: workers on each node, if there are several.
        sweep: on several nodes, start Ray for its trials; a run has its workers as tasks of Slurm.
        options: options of sbatch; those without a value are left out.
        words: further options of sbatch, as typed.
        command: arguments of Python that start the driver.
        variables: environment variables of the driver; the values are words of a shell.
    """
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    has_tasks = nodes > 1 and not sweep
    parts = (WORKERS, START_WORKERS) if has_tasks else (RAY if nodes > 1 else "", START)
    text = "".join((HEAD, *parts, DRIVER))
    return text.format(
        tasks=tasks,
        stop="scancel --signal=TERM $SLURM_JOB_ID.0" if has_tasks else "kill -TERM $driver",  # srun would kill them
        directives="\n".join(f"#SBATCH {shlex.quote(word)}" for word in [*given, *words]),
        variables=" ".join(f"{name}={value}" for name, value in variables.items()),
        folder=shlex.quote(str(folder)),
        run=shlex.quote(run),
        python=shlex.quote(sys.executable),
        command=shlex.join(command),
    )
