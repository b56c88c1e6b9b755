"""Shared fixtures: the command `mlx` as typed by a user, and experiments to run it in."""

import compileall
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from forkserver import Command, Commands, as_script
from storages import filled

pytest_plugins = ["leftovers", "cluster_users"]

ROOT = Path(__file__).parents[1]
EXPERIMENTS = Path(__file__).parent / "experiments"

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}

os.environ.update(KEYS)  # here, because some tests restore the environment of this process

MAIN = "import runpy; runpy.run_module('mlx_runtime', run_name='__main__', alter_sys=True)"
"""The end of a script that does what `python -m mlx_runtime` does, under other circumstances."""

TIMEOUT_S = 560
"""Timeout of one command."""

RINGS = ("pure", "process", "local", "s3", "browser", "cluster", "kills", "examples", "install", "gpu")
"""From inner to outer; pyproject.toml describes each of them."""

OUTSIDE = {"s3", "browser", "ray_cluster"}
"""Fixtures that tests of the inner three rings may not use."""

LONGEST = (
    *("test_cluster.py", "test_faults.py", "test_kinds.py"),
    *("test_engines.py", "test_export.py", "test_template.py"),
    *("test_cluster_folder.py", "test_install.py", "test_growth.py", "test_extending.py"),
    *("test_offline.py", "test_server.py", "test_functions.py", "test_command.py"),
    *("test_sharding.py", "test_data_jobs.py", "test_pipeline.py", "test_torchrun.py", "test_slurm.py"),
    *("test_second_machine.py", "test_python.py", "test_cluster_job.py"),
    *("test_runs_from_python.py", "test_runs.py", "test_mirrors.py", "test_examples.py", "test_setup.py"),
    *("test_driver.py", "test_notebook.py", "test_waterline.py", "test_tuning.py", "test_backends.py"),
    *("test_function_sweeps.py", "test_light.py", "test_serving_on_a_cluster.py"),
    *("test_zoo.py", "test_variants.py", "test_resuming.py", "test_shards.py"),
    *("test_evaluate.py", "test_replicas.py", "test_kube_launch.py", "test_kube_driver.py"),
    *("test_composition.py", "test_fuzz.py", "test_api.py", "test_data_job.py", "test_quick_looks.py"),
    *("test_generate.py", "test_upgrading.py", "test_optimization.py", "test_listing.py", "test_proving.py"),
)
"""The slowest files, slowest first. Each process runs one file after another."""

Mlx = Callable[..., "subprocess.CompletedProcess[str]"]

Started = Command | subprocess.Popen

Start = Callable[..., Started]

Script = Callable[..., dict[str, Any]]


def ring_of(item: pytest.Item) -> str | None:
    """Return the ring marked closest to a test: on its parameters, itself, its class or its module."""
    marks = [mark.name for node in item.listchain() for mark in node.own_markers]
    return next((name for name in reversed(marks) if name in RINGS), None)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the runtime once, because commands that tests start do not write bytecode.

    Shells start jobs in the background with SIGINT and SIGQUIT ignored, which the commands would inherit.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    spec = importlib.util.find_spec("mlx_runtime")
    if not hasattr(config, "workerinput") and spec is not None:
        compileall.compile_dir(*(spec.submodule_search_locations or ()), quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among the imported libraries, neither here nor later: each search takes a second.

    Keep the bytecode of test modules, which takes five seconds to make, even if PYTHONDONTWRITEBYTECODE is set.
    """
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        sys.dont_write_bytecode = writes_none


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail the collection of tests without a ring, and of tests in inner rings that use fixtures of outer ones."""
    report = yield
    problems = []
    for item in [node for node in report.result if isinstance(node, pytest.Item)]:
        ring, outside = ring_of(item), OUTSIDE & {*getattr(item, "fixturenames", ())}
        if ring is None:
            problems.append(f"{item.nodeid} has no ring; mark it with one of {', '.join(RINGS)}")
        elif outside and ring in RINGS[:3]:
            problems.append(f"{item.nodeid} is in the ring {ring} and uses {', '.join(sorted(outside))}")
    if problems:
        report.outcome, report.longrepr, report.result = "failed", "\n".join(problems), []
    return report


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test exactly one ring, and run the slowest files first."""
    rings = [ring_of(item) for item in items]
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers[:] = [mark for mark in node.own_markers if mark.name not in RINGS]
    for item, ring in zip(items, rings, strict=True):
        assert ring is not None
        item.add_marker(ring)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user: this Python first on the PATH, an empty home, S3 keys, no settings of mlx or Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLX_", "RAY_", "MAKE"))}
    for name in ("MFLAGS", "ARGS"):  # set by the `make test` that runs this
        kept.pop(name, None)
    home = tmp_path_factory.mktemp("home")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {"PATH": path, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_DISABLE_XET": "1"}
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return kept | KEYS | ours | compiled


@pytest.fixture(scope="session")
def commands(environment: dict[str, str]) -> Iterator[Commands]:
    """The server that runs commands with preloaded libraries."""
    with Commands(environment) as commands:
        yield commands


@pytest.fixture(scope="session")
def mlx(commands: Commands, environment: dict[str, str]) -> Mlx:
    """`mlx(folder, "train", "run", ...)` runs the command in a folder and returns the completed process."""

    def run(folder: Path, *arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
        changed = environment | settings | current_test()
        if forks(settings):
            return commands.run(folder, [*arguments], changed, TIMEOUT_S)
        command = [sys.executable, "-m", "mlx_runtime", *arguments]
        return subprocess.run(command, cwd=folder, env=changed, capture_output=True, text=True, timeout=TIMEOUT_S)

    return run


@pytest.fixture
def start(commands: Commands, environment: dict[str, str]) -> Iterator[Start]:
    """`start(folder, "train", "run", ...)` does the same in the background, until the end of the test at the latest."""
    started: list[Started] = []

    def start(folder: Path, *arguments: str, **settings: str) -> Started:
        changed = environment | settings | current_test()
        if forks(settings):
            started.append(commands.start(folder, [*arguments], changed))
        else:
            command, streams = [sys.executable, "-m", "mlx_runtime", *arguments], {"stdout": PIPE, "stderr": PIPE}
            started.append(
                subprocess.Popen(command, cwd=folder, env=changed, text=True, start_new_session=True, **streams)
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def current_test() -> dict[str, str]:
    """The variable by which leftover processes name the test that started them."""
    name = "PYTEST_CURRENT_TEST"
    return {name: os.environ[name]} if name in os.environ else {}


def forks(settings: Mapping[str, str]) -> bool:
    """True if these variables take effect in a command whose libraries were imported before."""
    others = ("PATH", "KUBECONFIG", "TMPDIR", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR")
    return all(name.startswith(("MLX_", "HF_")) or name in others for name in settings)


@pytest.fixture(scope="session")
def python(commands: Commands, environment: dict[str, str]) -> Mlx:
    """`python(folder, "script.py", ...)` runs a script of a folder, and returns the completed process."""

    def run(folder: Path, *command: str, **settings: str) -> "subprocess.CompletedProcess[str]":
        changed = environment | settings | current_test()
        if forks(settings):
            return commands.run(folder, [*command], changed, TIMEOUT_S, as_script(str(folder), [*command]))
        start = [sys.executable, *command]
        return subprocess.run(start, cwd=folder, env=changed, capture_output=True, text=True, timeout=TIMEOUT_S)

    return run


@pytest.fixture(scope="session")
def script(python: Mlx) -> Script:
    """`script(folder, text)` runs a Python script in a folder and returns the one line of JSON that it prints.

    It may print nothing else, except `stderr`.
    """

    def run(folder: Path, text: str, *, stderr: str = "") -> dict[str, Any]:
        (folder / "script.py").write_text(text)
        done = python(folder, "script.py")
        assert (done.returncode, done.stderr) == (0, stderr), done.stdout + done.stderr
        (line,) = done.stdout.splitlines()
        return dict(json.loads(line))

    return run


@pytest.fixture(scope="session")
def baked(mlx: Mlx, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated experiment, shared by all tests; tests that write to it use a copy."""
    done = mlx(tmp_path_factory.mktemp("baked"), "new", "digits")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[1].rstrip(";"))


@pytest.fixture(scope="session")
def bound(mlx: Mlx, baked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated experiment with its conf.yaml, shared by all tests; tests that write to it use a copy."""
    return bind(mlx, Path(shutil.copytree(baked, tmp_path_factory.mktemp("bound") / "digits")))


@pytest.fixture(scope="session")
def baked_job(mlx: Mlx, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated data job, shared by all tests; tests that write to it use a copy."""
    done = mlx(tmp_path_factory.mktemp("baked_job"), "data", "new", "shards")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[1].rstrip(";"))


@pytest.fixture
def digits(bound: Path, tmp_path: Path) -> Path:
    """A generated experiment for a single test, bound."""
    return Path(shutil.copytree(bound, tmp_path / "digits"))


@pytest.fixture(scope="session")
def make_in(mlx: Mlx, baked: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """`make_in("spec", parent)` creates an experiment folder from one of tests/experiments, and binds it."""
    made: dict[str, Path] = {}

    def make(name: str, parent: Path) -> Path:
        if name not in made:
            made[name] = bind(mlx, unbound(name, baked, tmp_path_factory.mktemp("made")))
        return Path(shutil.copytree(made[name], parent / name))

    return make


def unbound(name: str, baked: Path, parent: Path) -> Path:
    """Create an experiment folder from one of tests/experiments, without a conf.yaml."""
    shutil.copytree(EXPERIMENTS / name, parent / name / "src")
    shutil.copy(baked / "main.py", parent / name)
    return parent / name


def bind(mlx: Mlx, folder: Path) -> Path:
    done = mlx(folder, "train", "bind")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def experiment(make_in: Callable[[str, Path], Path], tmp_path: Path) -> Callable[[str], Path]:
    """`experiment("spec")` does the same, in the folder of the test."""
    return lambda name: make_in(name, tmp_path)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A bucket on a local S3 server, as a URI with a placeholder for the path: `s3.format("prepared")`."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket="bucket")
    yield f"s3://bucket/{{}}?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    server.stop()


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage with some data in it, in a folder and on S3; see storages.py."""
    if request.param == "folder":
        return filled(str(tmp_path / "storage"))
    return filled(request.getfixturevalue("s3").format(tmp_path.name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A storage with some data in it, in a folder."""
    return Path(filled(str(tmp_path / "storage")))


def edit(file: Path, old: str, new: str) -> None:
    """Replace a text in a file, as a user would. The text must occur in it."""
    text = file.read_text()
    assert old in text, f"{old!r} is not in {file}"
    file.write_text(text.replace(old, new))
