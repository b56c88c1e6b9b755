"""Addresses of clusters, in every form that users type, and the check that Ray responds there."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlx_runtime.cli.verbs import xp
from mlx_runtime.companions.ray import dashboard as dashboard_module
from mlx_runtime.companions.ray.addresses import Address
from mlx_runtime.companions.ray.dashboard import Dashboard, job_statuses
from mlx_runtime.errors import ClusterError, UsageError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries import listing
from mlx_runtime.runs.queries.lookup import resolve_run
from mlx_runtime.storage import leases

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("given", "url", "notice"),
    [
        ("http://head:8265", "http://head:8265", ""),
        ("head", "http://head:8265", "has no port"),
        ("head:6379", "http://head:8265", "Ray's own port"),
        ("ray://head:10001", "http://head:8265", "Ray Client"),
        ("[::1]:8265", "http://[::1]:8265", ""),
    ],
)
def test_forms(given: str, url: str, notice: str) -> None:
    found = Address.parse(given)
    assert found.url == url
    assert notice in found.notice
    assert bool(notice) == bool(found.notice)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("auto", "is not the address of a cluster"),
        ("ftp://head", "is not the address of a cluster"),
        ("http://me:secret@head:8265", "RAY_AUTH_TOKEN"),
    ],
)
def test_what_is_none(given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Address.parse(given)


def test_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://one:8265")
    assert Address.parse(None) == Address("http://one:8265", "RAY_ADDRESS")
    assert Address.parse("http://two:8265") == Address("http://two:8265", "--ray-address")
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(UsageError, match="which cluster"):
        Address.parse(None)


class Asked(HTTPServer):
    """A server that requires a token, and records what it receives.

    Attributes:
        sent: the `Authorization` header of each request, or None.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Refusing)
        self.sent: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Asked)
        self.server.sent.append(self.headers["Authorization"])
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_DELETE = do_PUT = do_GET  # noqa: N815 - as http.server looks for them

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """The record of a run in a shared storage names a server; this user has a token, also for Ray's own client."""
    with Asked() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = tmp_path / "home"
        home.mkdir()
        (home / ".netrc").write_text("default login me password hunter2\n")
        (home / ".netrc").chmod(0o600)
        for name, value in (("HOME", str(home)), ("MLX_STORAGE", str(tmp_path / "storage"))):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "the-token")
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        folder = RunFolder(tmp_path / "storage" / "digits" / "run_001")
        (folder.path / "logs").mkdir(parents=True)
        (folder.path / "logs" / "driver.log").write_text("what it printed\n")
        records.Record(folder, status="RUNNING", job={"id": "job-1", "address": server.url}, **leases.this_process())
        yield server
        server.shutdown()


def test_an_address_in_a_record_gets_no_token(
    server: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(xp, "STOP_S", 0.1)
    printed: list[str] = []
    assert [row.status for row in listing.list_rows(ask=job_statuses)] == ["RUNNING"]
    xp.logs(resolve_run("digits", "latest"), printed.append, follow=False)
    xp.logs(resolve_run("digits", "latest"), printed.append, follow=False, tail=1)
    with pytest.raises(Exception, match="still RUNNING"):
        xp.stop(resolve_run("digits", "latest"))
    assert server.sent
    assert {*server.sent} == {None}
    assert printed == ["what it printed\n"] * 2
    assert f"which only run.json names; if it is your cluster: RAY_ADDRESS={server.url}\n" in capsys.readouterr().err


def test_one_that_the_user_has_named_gets_it(server: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", server.url)
    listing.list_rows(ask=job_statuses)
    assert server.sent == [None, "Bearer the-token"]


def test_a_slow_cluster_is_not_one_without_jobs(
    server: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dashboard_module, "LIST_S", (0.2, 0.2))
    monkeypatch.setattr(dashboard_module, "STATE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert job_statuses({(url, "job-1")}) == {}
        dashboard = Dashboard(Address(url, "here"), "2.60", {}, None)
        with pytest.raises(ClusterError, match=r"did not answer within 0\.2 s"):
            dashboard.unused_id("job-1")
    assert f"note: {url} did not answer within 0.2 s" in capsys.readouterr().err


def test_a_file_of_the_token_that_cannot_be_read_is_named(
    server: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    with pytest.raises(ClusterError, match=rf"cannot read RAY_AUTH_TOKEN_PATH={file}: .*No such file"):
        Dashboard.connect(Address(server.url, "here"))
