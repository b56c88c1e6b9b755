"""Commands start fast: our own code imports only necessary libraries.

The experiment's `src` and its imports may import more.
"""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import Mlx
from hidden import hide

from mlx_runtime.extras import EXTRAS

pytestmark = pytest.mark.process

HOOK = '''\
"""Reports imports of some libraries, and of parts of them, that do not begin in a module of `src`."""

import sys
import traceback


class Reporter:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {watched!r}:
            return
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
        if "<frozen importlib.util>" in files:
            return  # it is only looked for
        ours = [file for file in files if file.startswith({package!r})]
        theirs = [file for file in files if file.startswith({src!r})]
        theirs += [file for file in files if "/torchmetrics/" in file or "/tensorboard/" in file]
        if ours and not theirs:
            with open({out!r}, "a") as file:
                print(name, "from", ours[0], file=file)


sys.meta_path.insert(0, Reporter())
'''

HEAVY = ("ray", "pandas", "pyarrow", "botocore", "optuna", "plotly", "huggingface_hub")
"""What a run of the template does without. TorchMetrics and TensorBoard may import some of it."""

PACKAGE = Path(__file__).parents[3] / "runtime" / "mlx_runtime"


class Cluster(BaseHTTPRequestHandler):
    """Answers like the dashboard of an empty cluster on which each job succeeds at once."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        answers = {"/api/version": {"ray_version": version("ray")}, "/api/jobs/": []}
        answer = answers.get(self.path, {"status": "SUCCEEDED", "message": "", "driver_exit_code": 0})
        if self.path.endswith("/logs"):
            room = {"nodes": [{"CPU": 64, "GPU": 0}], "grows": False}
            found = {"nodes": [], "group": None, "room": room}
            answer = {"logs": f"mlx-probe {json.dumps(found)}\n"}
        self.answer(404 if "/packages/" in self.path else 200, answer)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.answer(200, {})

    do_PUT = do_DELETE = do_POST  # noqa: N815 - as http.server looks for them

    def answer(self, code: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Cluster) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.examples
@pytest.mark.parametrize("kind", ["train", "data"])
def test_our_code_imports_neither_torch_nor_ray(
    kind: str, digits: Path, baked_job: Path, cluster: str, mlx: Mlx, environment: dict[str, str], tmp_path: Path
) -> None:
    folder = digits
    if kind == "data":
        folder = Path(shutil.copytree(baked_job, tmp_path / "shards"))
        assert mlx(folder, "data", "bind").returncode == 0
    settings = environment | hooked(folder, tmp_path, ("torch", "ray")) | {"RAY_ADDRESS": cluster}
    commands = [[kind, "launch"], ["data", "show"]]
    if kind == "train":
        commands += [["xp", *words] for words in (["ls"], ["best", "digits", "--metric", "a", "--mode", "min"])]
        commands += [["xp", "logs", "digits"], ["xp", "stop", "digits", "1"]]
        commands += [["xp", "diff", "1", "1"], ["xp", "rm", "digits", "1", "-y"]]
    for command in commands:
        arguments = [sys.executable, "-m", "mlx_runtime", *command]
        done = subprocess.run(arguments, cwd=folder, env=settings, capture_output=True, text=True, timeout=200)
        assert not heavy(tmp_path), command
        if "launch" in command:
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.splitlines()[-1] == "status    SUCCEEDED"


@pytest.mark.examples
def test_a_client_needs_none_of_what_runs_need(
    digits: Path, cluster: str, environment: dict[str, str], tmp_path: Path
) -> None:
    needed = {library for library, extra in EXTRAS.items() if extra == "train"}
    settings = environment | hide(tmp_path, needed) | {"RAY_ADDRESS": cluster}

    def typed(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "mlx_runtime", *words]
        return subprocess.run(command, cwd=digits, env=settings, capture_output=True, text=True, timeout=200)

    done = typed("train", "launch", "cfg.start_workers=3", "optimizers.adam.lr=1e-2")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "status    SUCCEEDED"), done.stdout + done.stderr
    wrong = typed("train", "launch", "cfg.start_workers=three")
    assert (wrong.returncode, "cfg.start_workers" in wrong.stdout) == (1, True), wrong.stdout + wrong.stderr
    assert "digits" in typed("xp", "ls").stdout
    for words in (["train", "run"], ["train", "show"], ["xp", "board"]):
        refused = typed(*words)
        assert refused.returncode == 1
        assert refused.stderr.endswith('type: pip install "mlx-runtime[train]"\n'), refused.stderr
        assert refused.stderr.count("\n") == 1


@pytest.mark.local
def test_a_plain_run_imports_no_ray(digits: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Neither in the driver nor in its workers, which inherit the hook; test_waterline.py is about runs without."""
    settings = environment | hooked(digits, tmp_path, HEAVY)
    arguments = [sys.executable, "-m", "mlx_runtime", "train", "run", "cfg.num_epochs=1", "cfg.start_workers=2"]
    done = subprocess.run(arguments, cwd=digits, env=settings, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not heavy(tmp_path)


def hooked(folder: Path, parent: Path, watched: tuple[str, ...]) -> dict[str, str]:
    """Return variables with which processes report imports by our own code, for a project in a folder."""
    (parent / "hook").mkdir()
    hook = HOOK.format(package=str(PACKAGE), src=str(folder / "src"), watched=watched, out=str(parent / "heavy.txt"))
    (parent / "hook" / "sitecustomize.py").write_text(hook)
    return {"PYTHONPATH": str(parent / "hook")}


def heavy(parent: Path) -> str:
    """Return what was reported."""
    file = parent / "heavy.txt"
    return file.read_text() if file.exists() else ""
