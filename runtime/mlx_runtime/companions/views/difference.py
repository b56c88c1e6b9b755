"""The differences between two runs."""

from collections.abc import Mapping
from typing import Any

from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.errors import StorageError
from mlx_runtime.runs.folder import RunFolder, read_errors
from mlx_runtime.runs.queries.listing import AskJobs, summarize
from mlx_runtime.runs.tables import format_duration, format_number
from mlx_runtime.storage.redaction import redact_tree
from mlx_runtime.tracking.trackers import flatten

RESOLVED = ("cfg.storage_path",)
"""Settings that locate a run and do not affect training."""


def difference(first: RunFolder, second: RunFolder, ask: AskJobs | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the differences between two runs in `run`, `config` and `metrics`: one or two values for each name."""
    a, b = (_describe(folder, ask) for folder in (first, second))
    return {
        part: {
            name: {side: values[name] for side, values in (("a", a[part]), ("b", b[part])) if name in values}
            for name in a[part] | b[part]
            if name not in a[part] or name not in b[part] or a[part][name] != b[part][name]
        }
        for part in a
    }


def table(
    first: RunFolder, second: RunFolder, differing: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> list[dict[str, str]]:
    """Format the result of `difference` as rows of a table."""
    a, b = first.title, second.title
    if a == b:
        a, b = first.location, second.location
    return [
        {"": name, a: _cell(part, values, "a"), b: _cell(part, values, "b")}
        for part, names in differing.items()
        for name, values in names.items()
    ]


def _cell(part: str, values: Mapping[str, Any], side: str) -> str:
    if side not in values:
        return "-"
    value = values[side]
    return format_number(value) if isinstance(value, float) and part != "config" else str(value)


def _describe(folder: RunFolder, ask: AskJobs | None) -> dict[str, dict[str, Any]]:
    """Return facts, config and metrics of a run, each as a flat dict."""
    [row] = summarize([folder], ask)
    if row.problem:
        raise StorageError(row.problem)
    with read_errors(folder, folder.conf.name):
        config = redact_tree(parse_config(folder.document(folder.conf.name), environment=False))
    record = row.record
    git = record.get("git") or {}
    facts: dict[str, Any] = {
        "status": row.status,
        "epoch": row.epoch,
        "duration": format_duration(row.duration_s),
    }
    facts |= {f"best {row.monitor}": row.best} if row.best is not None else {}
    facts |= {name: record.get(name) for name in ("seed", "workers", "device", "host", "python")}
    facts |= {"commit": git.get("commit"), "uncommitted changes": bool(git.get("diff"))}
    facts |= {f"{name} version": version for name, version in (record.get("packages") or {}).items()}
    settings = {name: value for name, value in flatten(config) if name not in RESOLVED}
    return {"run": facts, "config": settings, "metrics": dict(row.metrics)}
