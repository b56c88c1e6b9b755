"""A machine that only launches runs needs few libraries. What a run loads is tested in test_waterline.py."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
from hidden import hide

from mlx_runtime.extras import EXTRAS

pytestmark = pytest.mark.process


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
