"""Addresses of clusters, in every form that people type, and whether a Ray answers there."""

import re
import socket
import time

import pytest

from mlx_runtime.errors import ClusterError, UsageError
from mlx_runtime.jobs import Address, reached

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("given", "url", "notice"),
    [
        ("http://head:8265", "http://head:8265", ""),
        ("https://ray.example.com/cluster/", "https://ray.example.com/cluster", ""),
        ("head:8265", "http://head:8265", ""),
        ("head", "http://head:8265", "names no port"),
        ("head:6379", "http://head:8265", "Ray's own port"),
        ("ray://head:10001", "http://head:8265", "Ray Client"),
        ("ray://head", "http://head:8265", "Ray Client"),
        ("[::1]:8265", "http://[::1]:8265", ""),
    ],
)
def test_forms(given: str, url: str, notice: str) -> None:
    found = Address.of(given)
    assert found.url == url
    assert notice in found.notice
    assert bool(notice) == bool(found.notice)


@pytest.mark.parametrize("given", ["auto", "local", "ftp://head", "head:port", "http://", "--check"])
def test_what_is_none(given: str) -> None:
    with pytest.raises(UsageError, match="is no address of a cluster"):
        Address.of(given)


def test_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://one:8265")
    assert Address.of(None) == Address("http://one:8265", "RAY_ADDRESS")
    assert Address.of("http://two:8265") == Address("http://two:8265", "--ray-address")
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(UsageError, match="which cluster"):
        Address.of(None)


def test_a_password_is_refused() -> None:
    with pytest.raises(UsageError, match="RAY_AUTH_TOKEN"):
        Address.of("http://me:secret@head:8265")


def test_nobody_waits_for_a_cluster_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(ClusterError, match="did not answer within 5 s"):
            reached(Address(f"http://127.0.0.1:{silent.getsockname()[1]}", "here"))
        assert time.monotonic() - started < 6


@pytest.mark.s3
def test_another_server_is_told_apart(s3: str) -> None:
    port = re.search(r"127\.0\.0\.1:(\d+)", s3)
    assert port is not None
    with pytest.raises(ClusterError, match=r"is no Ray dashboard|cannot be asked"):
        reached(Address(f"http://127.0.0.1:{port[1]}", "here"))
