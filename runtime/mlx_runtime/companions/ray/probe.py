"""Print facts about the cluster of this job as one line of JSON, which `preflight` evaluates.

Runs on the cluster, where every package other than Ray may be missing.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_runtime.companions.ray import autoscaler

MARKER = "mlx-probe "  # prefix of the printed line

QUESTION = "MLX_PROBE"
"""Environment variable with the question as JSON: `root` of the storage, a `file` there and its `content`, names of
`variables` that must be set, the timeout of a node in `seconds`, the number of `workers` of the run, and the minimum
number of `gpus` for training on GPUs, or None."""

LOAD_S = 60.0  # timeout for importing torch on all nodes, with a GPU if the run needs some
GROUP_S = 30.0  # timeout for forming a process group and using it


def probe_cluster(question: dict[str, Any]) -> dict[str, Any]:
    """Return `nodes` (the answer of each, see `_Node.describe`, or its `ip` and an `error`), the outcome of a process
    `group` (see `_form_group`; None if the run needs no network between nodes), and the fields of the cluster's `room`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(logging_level="ERROR", log_to_driver=False)
    kind = ray.remote(num_cpus=0)(_Node)

    def actor_on(node: dict[str, Any], **resources: float) -> Any:
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        return kind.options(scheduling_strategy=here, **resources).remote()

    alive = [node for node in ray.nodes() if node["Alive"]]
    actors = [actor_on(node) for node in alive]
    refs = [actor.describe.remote(question, number) for number, actor in enumerate(actors)]
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=question["seconds"])
    nodes, able = [], []
    for ref, node, actor in zip(refs, alive, actors, strict=True):
        try:
            answer = ray.get(ref) if ref in done else {"error": f"did not answer within {question['seconds']:.0f} s"}
        except Exception as error:
            answer = {"error": _last_line(error)}
        nodes.append({"ip": node["NodeManagerAddress"], **answer})
        able += [(actor, node)] if answer.get("torch") else []
    room, needed, peers, backend = autoscaler.room(), question["gpus"], [], "cpu:gloo"
    if question["workers"] > 1 and needed is not None and room.now(GPU=1) >= needed:
        peers = [actor_on(node, num_gpus=0.01) for _, node in able if node["Resources"].get("GPU")]
        backend = "cpu:gloo,cuda:nccl"
    elif question["workers"] > 1:
        peers = [actor for actor, node in able if node["Resources"].get("CPU")]
    group = _form_group(backend, peers) if len(peers) > 1 else None
    return {"nodes": nodes, "group": group, "room": dataclasses.asdict(room)}


def _form_group(backend: str, peers: list[Any]) -> dict[str, Any]:
    """Return the number of `nodes` that have formed a group, or an `error`; empty if no GPU was free."""
    import ray

    addresses = [peer.address.remote() for peer in peers]
    if len(ray.wait(addresses, num_returns=len(peers), timeout=LOAD_S)[0]) < len(peers):
        return {}
    try:
        first, *_ = ray.get(addresses)
        refs = [peer.reduce.remote(backend, first, rank, len(peers)) for rank, peer in enumerate(peers)]
        ray.get(refs, timeout=GROUP_S + 5)  # raises as soon as one fails
    except ray.exceptions.GetTimeoutError:
        return {"error": f"{len(peers)} nodes did not finish an all-reduce within {GROUP_S:.0f} s"}
    except Exception as error:
        return {"error": _last_line(error)}
    return {"nodes": len(peers)}


class _Node:
    """The actor that answers for a node, in the same environment as workers of the run."""

    def describe(self, question: dict[str, Any], number: int) -> dict[str, Any]:
        """Describe the node: version of `python`, whether it has `torch`, a problem with the `storage` (or None), and
        `unset` variables. Torch is only looked for, because importing it takes seconds of a CPU."""
        return {
            "python": platform.python_version(),
            "torch": find_spec("torch") is not None,
            "storage": _storage_problem(question, number),
            "unset": [name for name in question["variables"] if not os.environ.get(name)],
        }

    def address(self) -> str:
        """Import torch. Return an address for the rendezvous of the nodes, chosen as by Ray Train."""
        import ray

        with _named_here(), socket.socket() as free:
            import torch.distributed  # noqa: F401 - now, because some nodes take longer than others

            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def reduce(self, backend: str, address: str, rank: int, size: int) -> None:
        """Form a process group with the other nodes, and use it."""
        with _named_here():
            all_reduce(backend, address, rank, size)


@contextlib.contextmanager
def _named_here() -> Iterator[None]:
    """Add the address of this node to errors."""
    import ray

    try:
        yield
    except Exception as error:  # begins with a location in the source of torch
        why = re.sub(r"^\[[^]]*\] ", "", _last_line(error))
        raise RuntimeError(f"{ray.util.get_node_ip_address()}: {why}") from None


def all_reduce(backend: str, address: str, rank: int, size: int) -> None:
    """Form a process group, and add up the numbers of all members, on each kind of device that the backend names."""
    import torch
    from torch import distributed

    timeout = datetime.timedelta(seconds=GROUP_S)
    distributed.init_process_group(backend, init_method=f"tcp://{address}", rank=rank, world_size=size, timeout=timeout)
    for device in (item.partition(":")[0] for item in backend.split(",")):
        total = torch.ones(1, device=device)
        distributed.all_reduce(total)
        assert total.item() == size, f"an all-reduce of {size} ones is {total.item():g}"


def _storage_problem(question: dict[str, Any], number: int) -> str | None:
    """Read the file written by the launching machine, and write one for that machine to read."""
    try:
        from mlx_runtime.storage.files import storage_at

        storage = storage_at(question["root"])
        if storage.local and not Path(storage.path).is_dir():
            return "no such folder"
        if storage.read(question["file"]).decode() != question["content"]:
            return "it is a different folder there"
        storage.write(b"", f"{question['file']}-{number}")
    except FileNotFoundError:
        return "files written here are not visible there"
    except Exception as error:
        return _last_line(error)
    return None


def _last_line(error: Exception) -> str:
    text = str(getattr(error, "cause", error)).strip()  # Ray's own message contains the traceback of a task
    return text.splitlines()[-1][:300] if text else type(error).__name__


if __name__ == "__main__":
    print(MARKER + json.dumps(probe_cluster(json.loads(os.environ[QUESTION]))), flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.close()
    os._exit(0)  # Ray's own shutdown takes seconds
