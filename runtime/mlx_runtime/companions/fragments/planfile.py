"""The file of a plan: which worker holds which blocks."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.companions.fragments.costs import Plan, roles
from mlx_runtime.distributed.collectives import broadcast, gather
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, StorageError
from mlx_runtime.storage.documents import COUNT, TEXT, Kind, from_json, list_of, misfit
from mlx_runtime.storage.local import read_regular
from mlx_runtime.workers.local import NODE_NAME

FILE_BYTES = 16 << 20

_LIST = Kind("a list", lambda value: isinstance(value, list))

_FIELDS = {"model": TEXT, "blocks": list_of(TEXT), "clusters": _LIST}
_CLUSTER = {"stages": _LIST}
_STAGE = {"node": TEXT.or_null(), "first": COUNT, "last": COUNT}


@dataclass(frozen=True)
class PlanFile:
    """The content of a file.

    Attributes:
        model: name of the model.
        blocks: their paths.
        clusters: machine and last block of each stage, by cluster.
    """

    model: str
    blocks: list[str]
    clusters: list[list[tuple[str, int]]]

    @property
    def nodes(self) -> list[str]:
        return [node for stages in self.clusters for node, _ in stages]


@dataclass(frozen=True)
class Layout:
    """The pipelines of a run.

    Attributes:
        ranks: of each pipeline, in the order of its stages.
        model: name of the model that the plan cuts; None without a plan.
        blocks: paths of its blocks.
        ends: position of the last block of each stage, by pipeline.
    """

    ranks: tuple[tuple[int, ...], ...]
    model: str | None = None
    blocks: Sequence[str] = ()
    ends: Sequence[Sequence[int]] = ()


def layout_of(fragments: Any, topology: Topology) -> Layout:
    """Return the pipelines of a run. Every worker must call this; rank 0 reads the plan.

    Raises:
        ConfigError: the plan cannot be read, or is for other workers.
    """
    if fragments.plan is None:
        return Layout(topology.replicas)
    names, facts = gather(os.environ.get(NODE_NAME) or None), {}
    if names is not None:
        try:
            facts = asdict(layout_for(Path(fragments.plan), fragments.stages, names))
        except ConfigError as error:
            facts = {"error": str(error)}
    facts = broadcast(facts)
    if "error" in facts:
        raise ConfigError(facts["error"])
    return Layout(**facts | {"ranks": tuple(map(tuple, facts["ranks"]))})


def layout_for(path: Path, stages: int | None, names: Sequence[str | None]) -> Layout:
    """Return the pipelines of a plan, given the machine of each worker by name, or None where it is unknown."""
    found = read(path)
    for own in found.clusters:
        if stages is not None and len(own) != stages:
            cure = "use cfg.strategy=ddp" if len(own) == 1 else "leave out cfg.fragments.stages"
            raise ConfigError(f"{path} has a cluster of {len(own)} stages, but cfg.fragments.stages={stages}; {cure}")
    if len(names) != len(found.nodes):
        raise ConfigError(
            f"{path} is for {len(found.nodes)} workers, but the run has {len(names)}; set cfg.start_workers="
            f"{len(found.nodes)}, or plan again with `mlx train clusterize`"
        )
    by_name = not {*names}.isdisjoint(found.nodes)
    if by_name and (sorted(map(str, names)) != sorted(found.nodes) or len({*names}) < len(names)):
        here = ", ".join(map(str, names))
        raise ConfigError(f"{path} is for {', '.join(found.nodes)}, but the workers are on {here}; plan for those")
    positions = iter(range(len(names)))
    ranks = [tuple(names.index(node) if by_name else next(positions) for node, _ in own) for own in found.clusters]
    ends = [[last for _, last in own] for own in found.clusters]
    first = next(number for number, own in enumerate(ranks) if 0 in own)  # its weights are those of checkpoints
    order = [first, *(number for number in range(len(ranks)) if number != first)]
    return Layout(
        tuple(ranks[number] for number in order), found.model, found.blocks, [ends[number] for number in order]
    )


def read(path: Path) -> PlanFile:
    """Read a plan.

    Raises:
        ConfigError: it cannot be read, or its stages have gaps.
    """
    try:
        if path.stat().st_size > FILE_BYTES:
            raise ValueError(f"it has more than {FILE_BYTES} bytes")
        document = from_json(read_regular(path, ValueError), _FIELDS, ("model", "blocks", "clusters"))
        clusters = [
            [(str(stage.get("node")), stage["first"], stage["last"]) for stage in _items(item, "stages", _STAGE)]
            for item in _items(document, "clusters", _CLUSTER)
        ]
        blocks = document["blocks"]
        found = PlanFile(document["model"], blocks, [[(node, last) for node, _, last in stages] for stages in clusters])
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"cfg.fragments.plan={path} cannot be read ({error}); `mlx train clusterize` writes one"
        ) from error
    if not all(clusters) or not clusters:
        raise ConfigError(f"{path} has no stages; `mlx train clusterize` writes them")
    for stages in clusters:
        expected = 0
        for _, first, last in stages:
            if first != expected or not first <= last < len(blocks):
                raise ConfigError(
                    f"{path} has a stage with blocks {first} to {last}; it must begin at {expected}, have at least one "
                    f"block, and end before {len(blocks)}"
                )
            expected = last + 1
    return found


def _items(document: Mapping[str, Any], name: str, shape: Mapping[str, Kind]) -> list[dict[str, Any]]:
    """Return the items of a list, or none; raise ValueError if one lacks a field, or has a wrong one."""
    found: list[dict[str, Any]] = document.get(name, [])
    for number, item in enumerate(found):
        if problem := misfit(item, shape, tuple(field for field in shape if field != "node")):
            raise ValueError(f"{name}, item {number}: {problem}")
    return found


def write(file: Path, model: str, found: Plan) -> None:
    """Write a plan as JSON. A strategy reads `model`, `blocks` and, of each stage, `node`, `first` and `last`."""
    document = {
        "model": model,
        "blocks": [block.name for block in found.blocks],
        "microbatches": found.microbatches,
        "average_every": found.average_every,
        "clusters": [
            {
                "step_s": found.step_s(number),
                "stages": [
                    {
                        "node": stage.machine.name,
                        "role": role,
                        "first": stage.first,
                        "last": stage.last,
                        "parameters": stage.parameters,
                        "memory": stage.memory,
                        "compute_s": stage.compute_s,
                        "transfer_s": stage.transfer_s,
                        "outputs_s": stage.outputs_s,
                    }
                    for role, stage in zip(roles(len(stages)), stages, strict=True)
                ],
            }
            for number, stages in enumerate(found.clusters)
        ],
        "idle": [machine.name for machine in found.idle],
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.tmp")
        temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise StorageError(f"cannot write {file}: {error.strerror or error}") from error
