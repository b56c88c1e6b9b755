"""Names of runs on command lines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_runtime.errors import UsageError
from mlx_runtime.runs.folder import names_run
from mlx_runtime.runs.queries.lookup import resolve_checkpoint, resolve_run

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("word", ["latest", "3", "digits/run_003", "s3://runs/demo?endpoint_override=x:1"])
def test_names(word: str) -> None:
    assert names_run(word)


@pytest.mark.parametrize("word", ["cfg.storage_path=s3://runs", "+cfg.a=1", "++cfg.a=1", "~cfg.callbacks", "--fast"])
def test_overrides(word: str) -> None:
    assert not names_run(word)


@pytest.mark.parametrize("resolve", [resolve_checkpoint, resolve_run])
def test_a_folder_that_is_no_run(resolve: Callable[[str], object], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{tmp_path} is not the folder of a run; choose"):
        resolve(str(tmp_path))
    with pytest.raises(UsageError, match="^runs/digits/run_009 is not the folder of a run; choose"):
        resolve("runs/digits/run_009")
