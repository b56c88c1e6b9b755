"""Read-only commands run no code that conf.yaml names, wherever it appears in the file."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx, edit

pytestmark = pytest.mark.process

TRAP = """\
from pathlib import Path
Path({marker!r}).touch()
def call(*_, **__): ...
"""


class Answering(BaseHTTPRequestHandler):
    """A cluster that responds but accepts no job."""

    def do_GET(self) -> None:
        body = json.dumps({"ray_version": version("ray")} if "version" in self.path else []).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


LOOKS = [
    ["doctor"],
    ["train", "show"],
    ["train", "launch", "--check"],
    ["xp", "ls"],
    ["data", "show"],
]


@pytest.fixture
def trapped(digits: Path, tmp_path: Path) -> Path:
    """An experiment next to a module that leaves a mark when it is imported."""
    (digits / "trap.py").write_text(TRAP.format(marker=str(tmp_path / "sprung")))
    (digits / "runs").mkdir()  # a storage to inspect
    return digits


def test_nothing_is_run(trapped: Path, cluster: str, mlx: Mlx, tmp_path: Path) -> None:
    callbacks = "{x: {_target_: trap.call}, y: {_target_: os.mkdir, _args_: [%s]}}" % (tmp_path / "sprung")
    edit(trapped / "src/conf.yaml", "callbacks: {}", f"callbacks: {callbacks}")
    (trapped / "key.pem").write_text("a key")
    for command in LOOKS:
        address = ["--ray-address", cluster] if "launch" in command else []
        done = mlx(trapped, *command, *address)
        printed = done.stdout + done.stderr
        assert "Traceback" not in printed
        assert not (tmp_path / "sprung").exists(), command
        if "doctor" in command or "launch" in command:
            line = "src/conf.yaml fits the code; not checked, because src does not import it: trap.call\n"
            assert f"ok    config     {line}" in printed
        assert ("note      not uploaded, may hold secrets: key.pem\n" in printed) == ("launch" in command)
    mlx(trapped, "train", "run", "--fast-dev-run")
    assert (tmp_path / "sprung").exists()  # running it does


def test_settings_are_explained_with_those_of_sections(digits: Path, mlx: Mlx) -> None:
    printed = mlx(digits, "train", "show", "--settings").stdout
    names = [line.partition("=")[0] for line in printed.splitlines() if line.startswith("cfg.")]
    assert names.index("cfg.sharding.shard_size") == names.index("cfg.sharding") + 1
    assert len(names) == len({*names}) > 60
    assert printed.count("\n    ") >= len(names)
    assert mlx(digits, "train", "show", "--settings", "cfg.sharding").stdout == (
        "cfg.sharding\n"
        "    sharding of models by `strategy`.\n"
        "cfg.sharding.shard_size=null  (at least 1)\n"
        "    number of workers that share one replica under `hsdp`; a divisor of the number of workers.\n"
        'cfg.sharding.offload="none"\n'
        "    `cpu` keeps sharded parameters, gradients and optimizer states in the memory of the host.\n"
    )
    done = mlx(digits, "train", "show", "--settings", "shard_size")
    assert (done.returncode, done.stderr) == (
        2,
        "error: there is no setting 'shard_size'. Did you mean 'sharding.shard_size'?\n",
    )
