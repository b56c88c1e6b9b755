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
    "driver",
    "workers",
    "loop",
    "tracking",
    "runs",
    "data",
    "config",
    "distributed",
    "events",
    "storage",
    "extras",
    "errors",
    "settings",
    "sections",
    "importing",
)
"""From highest to lowest. A room imports only from those after it."""

PUBLIC = {"__init__", "__main__", "datasets", "engines", "jax", "losses", "storages", "strategies", "trackers"}
"""Public names: they import from any room, and no room imports them."""

ON_OTHERS = {
    ("fragments", "ray"),
    ("fragments", "sharding"),
    ("fragments", "torchrun"),
    ("hub", "sharding"),
    ("jax", "notebook"),
    ("jobs", "prepared"),
    ("jobs", "ray"),
    ("kubernetes", "jobs"),
    ("kubernetes", "sweeps"),
    ("notebook", "ray"),
    ("prepared", "ray"),
    ("ray", "jobs"),
    ("ray", "sweeps"),
    ("serving", "hub"),
    ("serving", "ray"),
    ("serving", "sharding"),
    ("sharding", "ray"),
    ("surgery", "hub"),
    ("surgery", "sharding"),
    ("sweeps", "notebook"),
    ("sweeps", "ray"),
    ("sweeps", "views"),
    ("slurm", "jobs"),
    ("torchrun", "prepared"),
    ("ui", "fragments"),
    ("ui", "sweeps"),
    ("ui", "views"),
    ("views", "sweeps"),
}
"""The companions that use another one, as in docs/architecture.md."""

HOMES = {
    "IPython": {"companions.notebook.cell_display"},
    "aiohttp": {"companions.ray.dashboard"},
    "botocore": {"companions.stores.object_store"},
    "click": {
        "cli",
        "driver.arguments",
        "companions.kubernetes.commands",
        "companions.slurm.commands",
        *(f"companions.{name}.commands" for name, item in COMPANIONS.items() if item.commands),
    },
    "cloudpickle": {"companions.notebook.pickles"},
    "cookiecutter": {"cli.verbs.projects"},
    "detect_secrets": {"companions.hub.detection"},
    "huggingface_hub": {"companions.hub.pins", "companions.hub.repository"},
    "hydra": {"config.composition"},
    "flax": {"companions.jax"},
    "jax": {"companions.jax", "companions.notebook.backends"},
    "jinja2": {"companions.views.report"},
    "marimo": {
        "companions.ui.composer",
        "companions.ui.drawing",
        "companions.ui.elements",
        "companions.ui.server",
        "companions.ui.views",
    },
    "mlflow": {"companions.services.mlflow"},
    "onnxruntime": {"companions.serving.exports.proof"},
    "omegaconf": {"config", "storage.documents"},
    "optuna": {"companions.sweeps.report", "companions.sweeps.study"},
    "orjson": {"companions.serving.http.bodies"},
    "packaging": {"companions.surgery.upgrading"},
    "pathspec": {"runs.snapshots"},
    "plotly": {"companions.ui.charts", "companions.ui.views", "companions.views.report"},
    "pyarrow": {
        "companions.serving.predictions.results",
        "companions.serving.predictions.tables",
        "companions.stores.object_store",
    },
    "ray": {
        "companions.jobs.datajob",
        "companions.notebook.actors",
        "companions.notebook.inputs",
        "companions.notebook.tuning",
        "companions.ray",
        "companions.serving.cluster.replica",
        "companions.slurm.nodes",
    },
    "requests": {"companions.ray.dashboard"},
    "rich": {"runs.tables", "companions.sweeps.display", "tracking.console"},
    "ruamel": {"config"},
    "scipy": {"companions.views.comparison"},
    "sklearn": {"data.folds"},
    "starlette": {
        "companions.serving.http.application",
        "companions.serving.http.bodies",
        "companions.ui.server",
    },
    "tensorboard": {"companions.ui.events", "tracking.trackers"},
    "tensorflow": {"companions.notebook.backends"},
    "transformers": {"companions.hub.pretrained"},
    "uvicorn": {"companions.serving.http.server"},
    "wandb": {"companions.services.weights_and_biases"},
    "yaml": {"storage.documents"},
}
"""The rooms or modules that import each outside library."""


@functools.cache
def modules() -> dict[str, frozenset[str]]:
    """Return the names that each module imports, anywhere in its code, by its dotted name in the package."""
    return {name: imports(name) for name in trees()}


@functools.cache
def packages() -> list[str]:
    """Return the dotted names of rooms, of packages within rooms, and of companions."""
    return [name for name in trees() if name and file_of(name).name == "__init__.py"]


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name_of(file): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Return the names that a module imports, except for annotations, and the attributes of imported modules."""
    nodes = {*ast.walk(trees()[name])}
    checking = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    nodes -= {inner for node in checking for inner in ast.walk(node)}
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    bound = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    attributes = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    used = {f"{bound[node.value.id]}.{node.attr}" for node in attributes if node.value.id in bound}  # type: ignore[attr-defined]
    return frozenset({*names, *bound.values(), *used})


def edges(name: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    used = {path.removeprefix("mlx_runtime.") for path in modules()[name] if path.startswith("mlx_runtime.")}
    return {home for path in used if (home := module_of(path)) in modules()}


def module_of(path: str) -> str:
    """Return the module that an imported name is defined in."""
    while path and path not in modules():
        path = path.rpartition(".")[0]
    return path


def room(name: str) -> str:
    return name.partition(".")[0]


def companion(name: str) -> str:
    """Return the companion that a module belongs to, or nothing if it is one of the core."""
    return name.split(".")[1] if name.startswith("companions.") else ""


def test_every_module_is_in_a_room() -> None:
    assert {room(name) for name in modules()} == {*ROOMS, *PUBLIC, "companions"}
    assert {companion(name) for name in modules()} == {*COMPANIONS, ""}


@functools.cache
def parts(name: str) -> frozenset[str]:
    """Return the modules of companions that a module asks for by name, as in `part("hub.pins")`."""
    return frozenset(re.findall(r'\bpart\("([\w.]+)"\)', file_of(name).read_text()))


def file_of(name: str) -> Path:
    file = PACKAGE / f"{name.replace('.', os.sep)}.py"
    return file if file.is_file() else PACKAGE / name.replace(".", os.sep) / "__init__.py"


def test_the_core_imports_no_companion() -> None:
    core = [name for name in modules() if not companion(name) and name not in PUBLIC and name != "companions"]
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
    assert {used for used in asked if used not in COMPANIONS and f"companions.{used}" not in modules()} == set()
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
    graph = {name: edges(name) - {name} for name in modules() if name not in PUBLIC}
    graph = {name: {used for used in found if not name.startswith(f"{used}.")} for name, found in graph.items()}
    assert set(TopologicalSorter(graph).static_order()) >= set(graph)


@pytest.mark.parametrize("name", packages())
def test_a_room_says_what_it_is_for(name: str) -> None:
    said = ast.get_docstring(trees()[name])
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
    askers = set()
    for module, tree in trees().items():
        called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
        names = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in called}
        if names & RANKS:
            askers.add(room(module))
    assert askers == {"distributed"}


@pytest.mark.process
@pytest.mark.parametrize(
    "module",
    [
        *(
            "",
            ".cli",
            ".cli.train",
            ".cli.xp",
            ".workers.local",
            ".workers.fork_server",
        ),
        *(f".companions.{name}.commands" for name, item in COMPANIONS.items() if item.commands),
    ],
)
def test_the_command_starts_without_heavy_imports(module: str) -> None:
    heavy = "{'torch', 'ray', 'hydra', 'omegaconf', 'rich'}"
    script = f"import mlx_runtime{module}\nimport sys\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.process
def test_the_class_of_an_actor_imports_little() -> None:
    """A worker of Ray imports the other modules faster than those that Ray imports with its class."""
    heavy = "{'torch', 'torchmetrics', 'hydra', 'ray.train'}"
    script = f"import mlx_runtime.companions.ray.worker, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


OTHERS = {"_exit", "_split", "_timeout"}
"""Private names of Ray, Hugging Face, torch and Python that the package uses, too."""


def test_tests_use_no_private_name_of_the_package() -> None:
    ours: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    ours.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    ours.add(name)
    private = {name for name in ours if name.startswith("_") and not name.endswith("_")} - OTHERS
    found = []
    for file in (PACKAGE.parents[1] / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    continue
                case ast.Attribute(attr=name) if name in private:
                    found.append(f"{file.name}:{node.lineno}: {name}")
                case ast.ImportFrom(module=str(module), names=names) if module.startswith("mlx_runtime"):
                    found += [f"{file.name}:{node.lineno}: {item.name}" for item in names if item.name in private]
                case ast.Call(func=ast.Attribute(attr="setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                    found += [f"{file.name}:{node.lineno}: {name}"] * (name in private)
    assert found == []
