"""The decision whether a command runs on a cluster, because only that has the storage."""

from pathlib import Path

import pytest

from mlx_runtime.errors import ElsewhereError
from mlx_runtime.runs.queries import lookup

pytestmark = pytest.mark.pure


def test_commands_run_on_the_cluster_for_a_folder_that_this_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = str(tmp_path / "there")
    lookup.refuse_elsewhere(there)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    lookup.refuse_elsewhere(str(tmp_path))
    lookup.refuse_elsewhere("runs")
    with pytest.raises(ElsewhereError, match=f"lacks {there}; if the cluster has it, look there: mlx --on http://head"):
        lookup.refuse_elsewhere(there)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    lookup.refuse_elsewhere(there)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("MLX_JOB", "digits-run_001")
    lookup.refuse_elsewhere(there)
