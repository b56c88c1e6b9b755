"""Parts of the preflight checks that need no cluster."""

from pathlib import Path

import pytest
from clusters import free_ports
from torch import distributed

from mlx_runtime.companions.ray import preflight, probe

pytestmark = pytest.mark.pure


def test_a_process_group_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    try:
        found = probe._reduce("gloo", f"127.0.0.1:{free_ports(1)[0]}", 0, 1)
    finally:
        distributed.destroy_process_group()
    assert (found["interface"], found["latency_s"] > 0) == ("lo", True)
    measured = {"nodes": 2, "interface": "lo", "latency_s": 3.1e-4, "bytes_per_s": 1.25e9}
    lines = [check.line() for check in preflight._group_checks({"gloo": measured, "nccl": {}})]
    assert lines == [
        "ok    gloo       latency 0.31 ms, 1,250 MB/s between 2 nodes over lo",
        "ok    nccl       not measured: not every node has a free GPU",
    ]


def test_a_check_leaves_no_folder_that_would_hide_the_storage_of_the_cluster(tmp_path: Path) -> None:
    root = tmp_path / "shared" / "runs"
    with preflight.writable(str(root), ".probe", "text") as failed:
        assert failed is None
        assert (root / ".probe").read_text() == "text"
        (root / ".probe-0").touch()  # by a node
    assert not (tmp_path / "shared").exists()
    root.mkdir(parents=True)
    (root / "digits").mkdir()
    with preflight.writable(str(root), ".probe"):
        pass
    assert [file.name for file in root.iterdir()] == ["digits"]


def test_nodes_that_lack_a_secret_are_named() -> None:
    node = {"python": "3.11.0", "torch": "", "storage": ""}
    nodes = [node | {"ip": f"10.0.0.{number}", "unset": ["A"] if number else ["A", "B"]} for number in range(2)]
    (check,) = [check for check in preflight._node_checks(nodes, "/runs", 2) if check.name == "secrets"]
    assert check.text == "A is missing on 2 of 2 nodes: 10.0.0.0, 10.0.0.1; B is missing on 1 of 2 nodes: 10.0.0.0"
