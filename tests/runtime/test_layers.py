"""Rooms import only from rooms further down the list, companions build on them, and each library has one home."""

import ast
import functools
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from mlx_runtime import companions
from mlx_runtime.companions import COMPANIONS

pytestmark = pytest.mark.pure

PACKAGE = Path(__file__).parents[2] / "runtime" / "mlx_runtime"

ROOMS = (
    "cli",
    "exits",
    "training",
    "tracking",
    "runs",
    "data",
    "config",
    "distributed",
    "storage",
    "events",
    "extras",
    "errors",
    "settings",
    "sections",
    "importing",
)
"""From highest to lowest. A room imports only from those after it."""

DOORS = {"__init__", "__main__", "datasets", "engines", "losses", "storages", "strategies", "trackers"}
"""Public names: they import from any room, and no room imports them."""

ON_OTHERS = {
    ("hub", "sharding"),
    ("hub", "sweeps"),
    ("notebook", "ray"),
    ("prepared", "ray"),
    ("prepared", "sweeps"),
    ("ray", "sweeps"),
    ("sharding", "ray"),
    ("sweeps", "hub"),
    ("sweeps", "notebook"),
    ("sweeps", "prepared"),
    ("sweeps", "ray"),
    ("sweeps", "views"),
    ("views", "sweeps"),
}
"""The companions that use another one. docs/architecture.md says why."""

COMPANION_FOLDERS = [f"companions/{name}" for name in COMPANIONS]

HOMES = {
    "IPython": {"companions.notebook.cell_display"},
    "aiohttp": {"companions.ray.dashboard"},
    "botocore": {"companions.stores.object_store"},
    "click": {"cli", *(f"companions.{name}.commands" for name, item in COMPANIONS.items() if item.commands)},
    "cookiecutter": {"cli.verbs.projects"},
    "detect_secrets": {"storage.detection"},
    "huggingface_hub": {"companions.hub.pins", "companions.hub.repository", "config.pretrained"},
    "hydra": {"config.composition"},
    "jinja2": {"companions.views.report"},
    "matplotlib": {"training.gradients"},
    "mlflow": {"tracking.mlflow"},
    "omegaconf": {"config", "storage.documents"},
    "optuna": {"companions.sweeps.charts", "companions.sweeps.study"},
    "pathspec": {"runs.snapshots", "storage.uploads"},
    "plotly": {"companions.views.report"},
    "pyarrow": {"companions.prepared.mapping", "companions.stores.object_store"},
    "ray": {
        "companions.notebook.actors",
        "companions.prepared.mapping",
        "companions.ray",
        "companions.sweeps.engines.cluster",
    },
    "requests": {"companions.ray.dashboard"},
    "rich": {"runs.tables", "companions.sweeps.display", "tracking.console"},
    "ruamel": {"config"},
    "sklearn": {"companions.sweeps.folds"},
    "tensorboard": {"tracking.trackers"},
    "transformers": {"config.pretrained"},
    "wandb": {"tracking.weights_and_biases"},
    "yaml": {"storage.documents"},
}
"""The rooms or modules that import each outside library."""


@functools.cache
def modules() -> dict[str, frozenset[str]]:
    """Return the names that each module imports, anywhere in its code, by its dotted name in the package."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = frozenset(imports(ast.parse(file.read_text())))
    return found


def imports(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    checking = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    for_types = {inner for node in checking for inner in ast.walk(node)}
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def edges(name: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    used = {path.removeprefix("mlx_runtime.") for path in modules()[name] if path.startswith("mlx_runtime.")}
    return {path if path in modules() else path.rpartition(".")[0] for path in used} & set(modules())


def room(name: str) -> str:
    return name.partition(".")[0]


def companion(name: str) -> str:
    """Return the companion that a module belongs to, or nothing if it is one of the core."""
    return name.split(".")[1] if name.startswith("companions.") else ""


def test_every_module_is_in_a_room() -> None:
    assert {room(name) for name in modules()} == {*ROOMS, *DOORS, "companions"}
    assert {companion(name) for name in modules()} == {*COMPANIONS, ""}


def parts(name: str) -> set[str]:
    """Return the modules of companions that a module asks for by name, as in `part("hub.pins")`."""
    return set(re.findall(r'\bpart\("([\w.]+)"\)', file_of(name).read_text()))


def file_of(name: str) -> Path:
    file = PACKAGE / f"{name.replace('.', os.sep)}.py"
    return file if file.is_file() else PACKAGE / name.replace(".", os.sep) / "__init__.py"


def test_the_core_imports_no_companion() -> None:
    core = [name for name in modules() if not companion(name) and name not in DOORS and name != "companions"]
    assert {(name, used) for name in core for used in edges(name) if companion(used)} == set()
    assert {used for name in core for used in parts(name)} != set()


def test_companions_stand_on_others_only_where_the_docs_say_why() -> None:
    found = {
        (companion(name), other)
        for name in modules()
        if companion(name)
        for other in [*map(companion, edges(name)), *(used.partition(".")[0] for used in parts(name))]
        if other not in ("", companion(name))
    }
    assert found == ON_OTHERS


def test_what_is_asked_for_by_name_exists() -> None:
    asked = {used for name in modules() if name != "companions" for used in parts(name)}
    assert {used for used in asked if f"companions.{used}" not in modules()} == set()
    for item, facts in COMPANIONS.items():
        for command in facts.commands:
            assert hasattr(companions.part(f"{item}.commands"), command.replace(" ", "_"))


@pytest.mark.parametrize("above", ROOMS)
def test_imports_go_down(above: str) -> None:
    below = {*ROOMS[ROOMS.index(above) :], "companions"}  # whose modules `test_the_core_imports_no_companion` is about
    upward = {
        (name, used) for name in modules() if room(name) == above for used in edges(name) if room(used) not in below
    }
    assert upward == set()


def test_no_imports_in_circles() -> None:
    graph = {name: edges(name) - {name} for name in modules() if name not in DOORS}
    graph = {name: {used for used in found if not name.startswith(f"{used}.")} for name, found in graph.items()}
    assert set(TopologicalSorter(graph).static_order()) >= set(graph)


@pytest.mark.parametrize("name", [*(name for name in ROOMS if (PACKAGE / name).is_dir()), *COMPANION_FOLDERS])
def test_a_room_says_what_it_is_for(name: str) -> None:
    said = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
    assert said is not None
    assert said.partition("\n")[0].endswith(".")


@pytest.mark.parametrize("library", sorted(HOMES))
def test_an_outside_library_is_imported_at_home_only(library: str) -> None:
    users = {name for name, used in modules().items() if any(path.split(".")[0] == library for path in used)}
    homes = {home for home in HOMES[library] for name in users if f"{name}.".startswith(f"{home}.")}
    assert homes == HOMES[library], "a home that does not use it"
    assert [name for name in users if not any(f"{name}.".startswith(f"{home}.") for home in homes)] == []


RANKS = frozenset(
    f"get_{name}"
    for name in ("rank", "world_size", "world_rank", "local_rank", "local_world_size", "node_rank", "device")
)
"""Functions of torch.distributed and Ray Train that a topology stands for."""


def test_only_the_topology_is_asked_for_ranks() -> None:
    askers = {}
    for file in PACKAGE.rglob("*.py"):
        called = {node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)}
        names = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in called}
        if names & RANKS:
            askers[str(file.relative_to(PACKAGE))] = names & RANKS
    assert {name for name in askers if not name.startswith("distributed/")} == {"companions/ray/worker.py"}


@pytest.mark.process
@pytest.mark.parametrize(
    "module",
    [
        *("", ".cli", ".cli.data", ".cli.train", ".cli.xp", ".training.engines.local", ".training.engines.fork_server"),
        *(f".companions.{name}.commands" for name, item in COMPANIONS.items() if item.commands),
    ],
)
def test_the_command_starts_without_heavy_imports(module: str) -> None:
    heavy = "{'torch', 'ray', 'hydra', 'omegaconf', 'rich'}"
    script = f"import mlx_runtime{module}\nimport sys\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.process
def test_what_controls_the_workers_imports_little() -> None:
    """The workers of embedded Ray wait for the controller, so its imports delay every start."""
    heavy = "{'torch', 'torchmetrics', 'hydra'}"
    script = f"import mlx_runtime.companions.ray.failures, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
