"""Decisions before a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_runtime.driver.planning import may_be_prepared
from mlx_runtime.sections import Preparation


@pytest.mark.pure
@pytest.mark.parametrize(
    ("how", "root", "expected"),
    [
        ("auto", "~/prepared", True),
        ("auto", "~/none", False),
        ("auto", "s3://bucket/none", True),
        ("make", "~/none", True),
        ("never", "~/prepared", False),
    ],
)
def test_prepared_datasets_are_looked_for_where_there_may_be_some(
    how: str, root: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prepared").mkdir()
    config: Any = SimpleNamespace(cfg=SimpleNamespace(preparation=Preparation(how)), prepared_root=root)
    assert may_be_prepared(config) is expected
