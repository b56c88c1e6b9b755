"""What a job sees of its cluster: `python -m mlx_runtime.probe` in a job prints one line, which `preflight` judges.

Only Ray is needed there; everything else may be what is missing.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

MARK = "mlx-probe "
"""What its line begins with."""

QUESTION = "MLX_PROBE"
"""Name of the environment variable with the questions, as JSON: `root` of the storage, `file` to read there and
`content` of it, names of `variables` that must be set, and `seconds` that a node has to answer."""


def answers(question: dict[str, Any]) -> dict[str, Any]:
    """Ask every node of the cluster.

    Returns:
        `cpus`, `gpus`, and `nodes`: what each said (see `_node`), or its `ip` and an `error`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(logging_level="ERROR", log_to_driver=False)
    asked = ray.remote(num_cpus=0)(_node)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    refs = {
        asked.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            question, number
        ): node["NodeManagerAddress"]
        for number, node in enumerate(nodes)
    }
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=question["seconds"])
    told = []
    for ref, ip in refs.items():
        if ref not in done:
            told.append({"ip": ip, "error": f"did not answer within {question['seconds']:.0f} s"})
            continue
        try:
            told.append({"ip": ip, **ray.get(ref)})
        except Exception as error:
            told.append({"ip": ip, "error": str(error).strip().splitlines()[-1][:300]})
    total = ray.cluster_resources()
    return {"cpus": total.get("CPU", 0), "gpus": total.get("GPU", 0), "nodes": told}


def _node(question: dict[str, Any], number: int) -> dict[str, Any]:
    """What one node says: `python`, `ray`, `torch` and `storage` (None, or what is wrong), `unset` variables."""
    return {
        "python": platform.python_version(),
        "ray": importlib.metadata.version("ray"),
        "torch": _torch(),
        "storage": _storage(question, number),
        "unset": [name for name in question["variables"] if not os.environ.get(name)],
    }


def _torch() -> str | None:
    try:
        import torch  # noqa: F401 - whether it can be
    except Exception as error:
        return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return None


def _storage(question: dict[str, Any], number: int) -> str | None:
    """Read there what was written here, and write something to be found here."""
    try:
        from mlx_runtime.storage import Storage

        storage = Storage(question["root"])
        if storage.local and not Path(storage.path).is_dir():
            return "there is no such folder"
        if storage.read(question["file"]).decode() != question["content"]:
            return "another folder is there"
        storage.write(b"", f"{question['file']}-{number}")
    except FileNotFoundError:
        return "what was written from here is not there"
    except Exception as error:
        return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__
    return None


if __name__ == "__main__":
    print(MARK + json.dumps(answers(json.loads(os.environ[QUESTION]))), flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.close()
    os._exit(0)  # nothing to wait for
