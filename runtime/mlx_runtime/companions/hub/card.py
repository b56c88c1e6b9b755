"""The model card of a mirrored run: status, metrics, and the commands that repeat, continue and read the run."""

import contextlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_runtime.errors import printable
from mlx_runtime.runs.checkpoints.index import position
from mlx_runtime.runs.tables import format_number

_NOT_REPEATED = ("cfg.hub.mirror=", "cfg.storage_path=", "--resume")

TAGS = ("mlx-runtime", "pytorch")


def text(record: Mapping[str, Any], conf: Path) -> str:
    """Return the card of a run, in Markdown, with metadata for the Hub."""
    lines = ["---", f"tags: {json.dumps(list(TAGS))}", "---", ""]
    lines += [f"# {_plain(record.get('experiment'))} {_plain(record.get('run'))}", ""]
    epochs = f" after epoch {record['epoch'] + 1} of {record.get('epochs')}" if record.get("epoch") is not None else ""
    parameters = f" {record['parameters']:,} parameters." if record.get("parameters") else ""
    lines += [f"Status: {_plain(record.get('status'))}{epochs}.{parameters}", ""]
    best = record.get("best") or {}
    if best.get("value") is not None:
        name, value = _plain(record.get("monitor")), format_number(best["value"])
        lines += [f"Best `{name}`: {value}, in {position(best)}.", ""]
    if metrics := record.get("metrics"):
        lines += ["| metric | last value |", "|---|---|"]
        lines += [f"| `{_plain(name)}` | {format_number(value)} |" for name, value in sorted(metrics.items())] + [""]
    lines += ["## Reproduce", "", *_commands(record), ""]
    versions = {"python": record.get("python"), **(record.get("packages") or {})}
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    machine = f"{record.get('workers')} workers, {_plain(record.get('device'))}"
    lines += [f"Seed {record.get('seed')}, {machine}; {_plain(known)}.", ""]
    lines += ["`code.zip` contains the code, and `conf.yaml` the whole config:", ""]
    with contextlib.suppress(OSError, ValueError):
        lines += _code("yaml", *conf.read_text(encoding="utf-8").splitlines())
    return "\n".join(lines) + "\n"


def _commands(record: Mapping[str, Any]) -> list[str]:
    """Return commands that repeat the run, or Python code if its class is not the experiment of the project."""
    commit = (record.get("git") or {}).get("commit")
    checkout = [f"git checkout {_plain(commit)}"] if commit else []
    chosen = [item for item in record.get("overrides") or [] if not item.lstrip("+").startswith(_NOT_REPEATED)]
    if path := record.get("experiment_class"):
        module, _, name = _plain(path).rpartition(".")
        call = f"run({name}, {_plain(json.dumps(chosen))}).result()"
        lines = ["from mlx_runtime import run", f"from {module} import {name}", "", call]
        return [*(_code("sh", *checkout) if checkout else []), *_code("python", *lines)]
    return _code("sh", *checkout, _plain(shlex.join(["mlx", "train", "run", *chosen])))


def _code(language: str, *lines: str) -> list[str]:
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"
    return [f"{fence}{language}", *lines, fence]


def _plain(value: Any) -> str:
    """Return a text from a record, escaped for one line of Markdown."""
    return printable(str(value), one_line=True).replace("`", "'").replace("|", "/")
