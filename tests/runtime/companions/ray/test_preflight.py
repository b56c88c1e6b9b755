"""Preflight checks that need no cluster."""

from pathlib import Path

import pytest

from mlx_runtime.companions.ray import preflight

pytestmark = pytest.mark.pure


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
