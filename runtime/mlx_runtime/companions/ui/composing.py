"""The draft of a conf.yaml: edited node by node, checked, compared, and saved as conf.yaml or as a variant.

The code of the project runs in the processes of a `Workbench` only. A draft never changes: edits return another one.
"""

import difflib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_runtime.companions.ui.workbench import Workbench
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import name_problem
from mlx_runtime.storage.local import read_regular, write_atomic

SCHEMA = "conf.schema.json"


@dataclass(frozen=True)
class Draft:
    """An edited conf.yaml.

    Attributes:
        project: folder of the experiment.
        base: conf.yaml as it was read.
        text, schema, nodes: the edited one, with its schema, and what can be edited in it; see `editing.view`.
        refused: texts that were typed into fields and refused, with the reason, by the key of the field.
    """

    project: Path
    base: str
    text: str
    schema: str
    nodes: dict[str, Any]
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def offered(self, key: str) -> tuple[list[str], list[str]]:
        """Return the paths of the classes that fit a node, and of those that fit a new block of it."""
        classes, blocks = _call(self.project, "offered", self.text, key)
        return classes, blocks

    def set(self, key: str, name: str, typed: str) -> "Draft":
        """Set an argument of a node to a typed text. If its field refuses that, the new draft cannot be saved."""
        here = f"{key}.{name}"
        others = {place: found for place, found in self.refused.items() if place != here}
        try:
            return replace(self._edit("set", key, name, typed), refused=others)
        except MlxError as error:
            if name not in self.nodes.get(key, {"fields": ()})["fields"]:  # no field would show it
                raise
            return replace(self, refused=others | {here: (typed, str(error))})

    def replace(self, key: str, path: str) -> "Draft":
        """Choose another class for a node. It keeps the arguments that the new class has, too."""
        return self._edit("replace", key, path)

    def add_block(self, key: str, path: str) -> "Draft":
        """Append a block to a node like `nn.Sequential`."""
        return self._edit("add", key, path)

    def remove_block(self, key: str, index: int) -> "Draft":
        """Remove a block of a node."""
        return self._edit("remove", key, index)

    def move_block(self, key: str, index: int, to: int) -> "Draft":
        """Move a block of a node to another position."""
        return self._edit("move", key, index, to)

    def _edit(self, action: str, key: str, *arguments: Any) -> "Draft":
        view = _call(self.project, "edit", self.text, self.schema, action, key, arguments)
        # Fields of a node that has another class now, or another number, are gone with what was typed into them.
        gone = () if action == "set" else (f"{key}.", f"{key}[")
        refused = {name: item for name, item in self.refused.items() if not name.startswith(gone)}
        return replace(self, **view, refused=refused)


def _call(project: Path, function: str, *arguments: Any) -> Any:
    return Workbench(project).call(f"mlx_runtime.companions.ui.editing:{function}", *arguments)


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
    """Return the problems of a draft, each with the key of its node, and its models with shapes: `editing.check`."""
    refused = [[name.rpartition(".")[0], line] for name, (_, line) in draft.refused.items()]
    try:
        found = _call(draft.project, "check", draft.text)
    except MlxError as error:
        found = {"problems": [["", str(error)]], "models": []}
    return {**found, "problems": [*refused, *found["problems"]]}


def diff(draft: Draft) -> str:
    """Return what saving the draft changes, as a unified diff."""
    before, after = draft.base.splitlines(keepends=True), draft.text.splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, str(CONF), f"{CONF} (new)"))


def save(draft: Draft) -> Draft:
    """Write conf.yaml and its schema, unless another program has changed the file since it was read."""
    _refuse(draft)
    path = draft.project / CONF

    def unchanged() -> None:
        if _read(path) != draft.base:
            raise UsageError(f"{CONF} has been changed since it was read here; nothing is saved. Open it again")

    write_atomic(path, draft.text, unchanged)
    write_atomic(path.with_name(SCHEMA), draft.schema)
    return replace(draft, base=draft.text)


def save_variant(draft: Draft, name: str) -> Path:
    """Write the changes of a draft as a new variant, and return its file."""
    _refuse(draft)
    if problem := name_problem("the name of the variant", name):
        raise UsageError(problem)
    path = draft.project / CONF.parent / "variants" / f"{name}.yaml"
    text = _call(draft.project, "variant", draft.base, draft.text)
    if not text:
        raise UsageError(f"there is nothing to save: the draft is like {CONF}")
    path.parent.mkdir(exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"there is a variant {name} already; choose another name") from None
    return path


def _refuse(draft: Draft) -> None:
    for _, line in draft.refused.values():
        raise UsageError(f"nothing is saved: {line}")


@dataclass(frozen=True)
class Start:
    """A run that was started: its process, its command, and the file with its output."""

    process: "subprocess.Popen[bytes]"
    command: str
    log: Path

    def state(self) -> str:
        """Return whether it trains, and what it printed last."""
        code = self.process.poll()
        lines = self.log.read_text(errors="replace").splitlines()[-12:]
        return "\n".join([f"{self.command}: {'running' if code is None else f'ended with exit code {code}'}", *lines])


def start(project: Path, arguments: str = "", storage: str | None = None) -> Start:
    """Train the saved conf.yaml like `make run ARGS=…`, in a process that outlives this one.

    Args:
        arguments: variants and overrides, as typed. They may not name classes, or another run.
        storage: of the run, instead of the one in conf.yaml.
    """
    words = _call(project, "words_of", arguments)
    folder = Settings.read().cache / "started"
    folder.mkdir(parents=True, exist_ok=True)
    handle, log = tempfile.mkstemp(".log", time.strftime("%Y%m%d-%H%M%S-"), folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLX_UI")}  # the page's secrets
    with os.fdopen(handle, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_runtime", "train", "run", *words],
            cwd=project,
            env=kept | ({"MLX_STORAGE": storage} if storage else {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Start(process, " ".join(["mlx train run", *words]), Path(log))
