"""The draft of a conf.yaml: edited node by node, checked, compared, and saved as conf.yaml or as a variant.

The code of the project runs in the processes of `workbench.call` only. A draft never changes: edits return another one.
"""

import difflib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_runtime.companions.ui.workbench import call
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, SCHEMA
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import name_problem
from mlx_runtime.storage.local import read_regular, write_atomic

CHECK_S = 10.0
"""Time limit for building the models, which follows each edit."""


@dataclass(frozen=True)
class Draft:
    """An edited conf.yaml.

    Attributes:
        project: folder of the experiment.
        base: conf.yaml as it was read.
        text, schema, nodes: the edited one, with its schema, and what can be edited in it; see `editing.view`.
    """

    project: Path
    base: str
    text: str
    schema: str
    nodes: dict[str, Any]

    def offered(self, key: str) -> tuple[list[str], list[str]]:
        """Return the paths of the classes that fit a node, and of those that fit a new block of it."""
        classes, blocks = _call(self.project, "offered", self.text, key)
        return classes, blocks

    def edit(self, action: str, key: str, *arguments: Any) -> "Draft":
        """Change a node; `editing.edit` lists the actions. MlxError if one of the arguments is refused."""
        return replace(self, **_call(self.project, "edit", self.text, self.schema, action, key, arguments))


def _call(project: Path, function: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
    return call(project, f"mlx_runtime.companions.ui.editing:{function}", *arguments, timeout_s=timeout_s)


def open_config(project: Path) -> Draft:
    """Read the conf.yaml of an experiment, with what `mlx train bind` would add to it."""
    base = _read(project / CONF)
    if base is None:
        raise UsageError(f"there is no {CONF} in {project}; write it with: {AN_EXPERIMENT.command} bind")
    return Draft(project, base, **_call(project, "view", base, _read((project / CONF).with_name(SCHEMA)) or ""))


def _read(path: Path) -> str | None:
    try:
        return read_regular(path, UsageError).decode(errors="surrogateescape")  # reported as invalid YAML
    except FileNotFoundError:
        return None


def check(draft: Draft) -> dict[str, Any]:
    """Return the problems of a draft, a line each, and its models with shapes: `editing.check`."""
    try:
        return dict(_call(draft.project, "check", draft.text, timeout_s=CHECK_S))
    except MlxError as error:
        return {"problems": [str(error)], "models": []}


def diff(draft: Draft) -> str:
    """Return what saving the draft changes, as a unified diff."""
    before, after = draft.base.splitlines(keepends=True), draft.text.splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, str(CONF), f"{CONF} (new)"))


def _refuse_changed(draft: Draft) -> None:
    if _read(draft.project / CONF) != draft.base:
        raise UsageError(f"{CONF} has been changed since it was read here; nothing was done. Click Drop changes")


def save(draft: Draft) -> Draft:
    """Write conf.yaml and its schema, unless another program has changed the file since it was read."""
    path = draft.project / CONF
    write_atomic(path, draft.text, lambda: _refuse_changed(draft))
    write_atomic(path.with_name(SCHEMA), draft.schema)
    return replace(draft, base=draft.text)


def save_variant(draft: Draft, name: str) -> Path:
    """Write the changes of a draft as a new variant, and return its file."""
    if problem := name_problem("the name of the variant", name):
        raise UsageError(problem)
    path = draft.project / CONF.parent / "variants" / f"{name}.yaml"
    text = _call(draft.project, "variant", draft.base, draft.text)
    if not text:
        raise UsageError(f"there is nothing to save: the draft is like {CONF}")
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        raise UsageError(f"there is a variant {name} already; choose another name")
    write_atomic(path, text)
    return path


def start(draft: Draft, storage: str | None = None) -> Path:
    """Train the saved conf.yaml like `make run`, in a process that outlives this one; return the file of its output.

    Args:
        storage: of the run, instead of the one in conf.yaml.
    """
    if diff(draft):
        raise UsageError(f"the draft is not saved, and a run reads {CONF}; save it first")
    _refuse_changed(draft)
    folder = Settings.read().cache / "started"
    folder.mkdir(parents=True, exist_ok=True)
    handle, log = tempfile.mkstemp(".log", time.strftime("%Y%m%d-%H%M%S-"), folder)
    with os.fdopen(handle, "wb") as output:
        subprocess.Popen(
            [sys.executable, "-m", "mlx_runtime", "train", "run"],
            cwd=draft.project,
            env=dict(os.environ) | ({"MLX_STORAGE": storage} if storage else {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Path(log)
