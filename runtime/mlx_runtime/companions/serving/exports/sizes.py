"""The sizes of inputs that an exported program accepts."""

from collections.abc import Mapping
from typing import Any

from torch.export import ExportedProgram


def size_limits(exported: ExportedProgram) -> dict[str, list[Any]]:
    """Return the sizes of the inputs by column: a number, or [minimum, maximum or None] where a dimension varies.

    torch reports a minimum of 2 for dimensions without a limit.
    """
    names, sizes = list(exported.example_inputs[0][0]), {}
    inputs = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder" and node.name in inputs]
    for name, node in zip(names, nodes, strict=True):
        sizes[name] = [
            size if isinstance(size, int) else _limits(size.node.expr, exported) for size in node.meta["val"].shape
        ]
    return sizes


def _limits(size: Any, exported: ExportedProgram) -> int | list[int | None]:
    if size.is_number:
        return int(size)
    if (limits := exported.range_constraints.get(size)) is None:  # a multiple of another dimension
        return [1, None]
    lower = int(limits.lower)
    return [lower if lower > 2 else 1, int(limits.upper) if limits.upper < 2**31 else None]


def fixed_sizes(exported: ExportedProgram, varying: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return the dimensions that should vary but have one size: column, dimension and size."""
    limits = size_limits(exported)
    found = [(name, axis, limits[name][axis]) for name, axes in varying.items() for axis in axes]
    return [item for item in found if isinstance(item[2], int)]
