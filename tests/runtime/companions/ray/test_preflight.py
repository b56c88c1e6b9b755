"""Preflight checks that need no cluster."""

from pathlib import Path
from typing import NoReturn

import pytest
from clusters import free_ports
from torch import distributed

from mlx_runtime.companions.jobs import checks
from mlx_runtime.companions.ray import preflight, probe
from mlx_runtime.errors import UsageError

pytestmark = pytest.mark.pure


def test_a_process_group_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    try:
        probe.all_reduce("cpu:gloo", f"127.0.0.1:{free_ports(1)[0]}", 0, 1)
    finally:
        distributed.destroy_process_group()
    groups = (None, {"nodes": 2}, {}, {"error": "10.0.0.1: Connection refused"})
    lines = [check.line() for group in groups for check in preflight.network_checks(group)]
    assert lines[:2] == [
        "ok    network    2 nodes form a process group",
        "ok    network    not tried: not every node has a free GPU",
    ]
    assert lines[2].startswith("FAIL  network    the nodes cannot form a process group: 10.0.0.1: Connection refused. ")


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


def test_nodes_that_lack_torch_or_a_secret_are_named() -> None:
    node = {"python": "3.11.0", "torch": True, "storage": None}
    nodes = [node | {"ip": f"10.0.0.{number}", "unset": ["A"] if number else ["A", "B"]} for number in range(2)]
    nodes[1]["torch"] = False
    found = {check.name: check.text for check in preflight.node_checks(nodes, "/runs", 2) if not check.ok}
    assert (found["torch"], "storage" in found) == ("is not installed on 10.0.0.1", False)
    missing = "A is missing on 2 of 2 nodes: 10.0.0.0, 10.0.0.1; B is missing on 1 of 2 nodes: 10.0.0.0"
    assert found["secrets"] == missing


def test_a_wrong_name_of_a_run_is_an_error_of_usage() -> None:
    def load() -> NoReturn:
        raise UsageError("digits has no run 'nope'. Available: run_001.")

    with pytest.raises(UsageError):
        checks.Checks().config(load)


@pytest.mark.parametrize("text", ["none. Available: a.", "none. Did you mean 'a'?"])
def test_a_failed_check_ends_its_sentences_once(text: str) -> None:
    assert checks.Check("config", text, "Edit it").line() == f"FAIL  config     {text} Edit it"
