"""Print what a job sees of its cluster as one line of JSON, which `preflight` evaluates.

Runs on the cluster, where anything but Ray may be missing.
"""

import contextlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

MARKER = "mlx-probe "  # prefix of the printed line

QUESTION = "MLX_PROBE"
"""Environment variable with the question as JSON: `root` of the storage, a `file` there and its `content`, names of
`variables` that must be set, and the `seconds` that a node has to answer."""


def probe_cluster(question: dict[str, Any]) -> dict[str, Any]:
    """Return `cpus`, `gpus`, and `nodes`: the answer of each (see `_probe_node`), or its `ip` and an `error`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(logging_level="ERROR", log_to_driver=False)
    task = ray.remote(num_cpus=0)(_probe_node)
    refs = {}
    for number, node in enumerate(node for node in ray.nodes() if node["Alive"]):
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        refs[task.options(scheduling_strategy=here).remote(question, number)] = node["NodeManagerAddress"]
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=question["seconds"])
    nodes = []
    for ref, ip in refs.items():
        try:
            answer = ray.get(ref) if ref in done else {"error": f"did not answer within {question['seconds']:.0f} s"}
        except Exception as error:
            answer = {"error": _last_line(error)}
        nodes.append({"ip": ip, **answer})
    total = ray.cluster_resources()
    return {"cpus": total.get("CPU", 0), "gpus": total.get("GPU", 0), "nodes": nodes}


def _probe_node(question: dict[str, Any], number: int) -> dict[str, Any]:
    """Describe a node: version of `python`, problems with `torch` and `storage` (or None), `unset` variables."""
    return {
        "python": platform.python_version(),
        "torch": _torch_problem(),
        "storage": _storage_problem(question, number),
        "unset": [name for name in question["variables"] if not os.environ.get(name)],
    }


def _torch_problem() -> str | None:
    try:
        import torch  # noqa: F401 - only whether it can be imported
    except Exception as error:
        return _last_line(error)
    return None


def _storage_problem(question: dict[str, Any], number: int) -> str | None:
    """Read the file that the launching machine wrote, and write one for it to see."""
    try:
        from mlx_runtime.storage.files import Storage

        storage = Storage(question["root"])
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
    text = str(error).strip()
    return text.splitlines()[-1][:300] if text else type(error).__name__


if __name__ == "__main__":
    print(MARKER + json.dumps(probe_cluster(json.loads(os.environ[QUESTION]))), flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.close()
    os._exit(0)  # Ray's own shutdown takes seconds
