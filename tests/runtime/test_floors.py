"""The package is built in floors: a module imports only from below, and each outside library has a home."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

PACKAGE = Path(__file__).parents[2] / "runtime" / "mlx_runtime"

FLOORS = [
    {"redaction"},
    {"accumulation", "documents", "epochs", "importing", "sampling", "settings", "sources", "uploads"},
    {"errors", "declarations"},
    {"callbacks", "gradients", "ray_private", "reduction", "storage"},
    {"saved", "trackers"},
    {"config"},
    {"layout", "signatures", "parallel", "probe", "stepping"},
    {
        "nodes",
        "cluster",
        "reading",
        "checkpoints",
        "progress",
        "tracking",
        "registry",
        "snapshots",
        "control",
        "watching",
        "profiling",
    },
    {"failures", "logs", "resuming"},
    {"loading", "filling", "jobs"},
    {"prepared", "streaming"},
    {"datasets", "preparation"},
    {"experiment", "verification", "schema"},
    {"training", "binding"},
    {"engines"},
    {"trainer", "datajob"},
    {"origins", "projects", "contents"},
    {"preflight"},
    {"launch"},
    {"train", "xp"},
    {"data"},
    {"listing"},
    {"comparison", "removal", "report"},
    {"cli", "runs"},
]

HOMES = {
    "click": {"cli"},
    "cookiecutter": {"projects"},
    "hydra": {"loading"},
    "jinja2": {"report"},
    "matplotlib": {"gradients"},
    "mlflow": {"trackers"},
    "omegaconf": {"binding", "documents", "loading"},
    "pathspec": {"uploads"},
    "plotly": {"report"},
    "pyarrow": {"preparation", "prepared", "storage"},
    "ray": {
        "cluster",
        "datajob",
        "engines",
        "failures",
        "jobs",
        "parallel",
        "preparation",
        "probe",
        "ray_private",
        "streaming",
        "training",
    },
    "requests": {"jobs"},
    "rich": {"listing", "progress"},
    "ruamel": {"binding", "origins"},
    "tensorboard": {"trackers"},
    "wandb": {"trackers"},
    "yaml": {"documents", "loading"},
}


@functools.cache
def modules() -> dict[str, set[str]]:
    """What each module imports, by its name on the floors; a folder counts as one."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if not name.startswith("__"):
            found.setdefault(name, set()).update(imports(ast.parse(file.read_text())))
    return found


def imports(tree: ast.Module) -> set[str]:
    """Every module named in an import statement, wherever it stands."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_module_has_a_floor() -> None:
    assert set(modules()) == set().union(*FLOORS)


@pytest.mark.parametrize("name", sorted(set().union(*FLOORS)))
def test_imports_only_go_down(name: str) -> None:
    floor = next(index for index, names in enumerate(FLOORS) if name in names)
    below = set().union(*FLOORS[:floor]) | {name}
    used = {path.split(".")[1] for path in modules()[name] if path.startswith("mlx_runtime.")}
    assert used - {"__version__"} <= below


@pytest.mark.parametrize("library", sorted(HOMES))
def test_an_outside_library_is_imported_at_home_only(library: str) -> None:
    users = {name for name, used in modules().items() if any(path.split(".")[0] == library for path in used)}
    assert users == HOMES[library]


@pytest.mark.process
@pytest.mark.parametrize(
    "module",
    ["", ".cli", ".cli.data", ".cli.train", ".cli.xp", ".engines.local", ".engines.processes"],
)
def test_the_command_starts_without_heavy_imports(module: str) -> None:
    heavy = "{'torch', 'ray', 'hydra', 'omegaconf', 'rich'}"
    script = f"import mlx_runtime{module}\nimport sys\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.process
def test_what_controls_the_workers_imports_little() -> None:
    """They wait for it: each second there is one of every start."""
    script = "import mlx_runtime.failures, sys; print(sorted({'torch', 'torchmetrics', 'hydra'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
