"""Names of runs on command lines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_runtime.errors import ConfigError, StorageError, UsageError
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import claim_run, names_run
from mlx_runtime.runs.queries.lookup import conf_value, find_checkpoint, resolve_checkpoint, resolve_run

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


def test_the_best_checkpoint_of_a_run_with_a_damaged_record(tmp_path: Path) -> None:
    run = claim_run(str(tmp_path), "digits")
    CheckpointStore(run.checkpoints).save({}, CheckpointInfo(0, True, 10, {"loss": 0.5}))
    run.record.write_text("{")
    with pytest.raises(StorageError, match=r"run\.json"):
        find_checkpoint(run, "best")


def test_a_value_of_an_unset_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLX_TEST_UNSET", raising=False)
    Path("src").mkdir()
    Path("src/conf.yaml").write_text("cfg: {storage_path: '${oc.env:MLX_TEST_UNSET}/runs'}\n")
    with pytest.raises(ConfigError, match=r"^cfg.storage_path in src/conf.yaml is .*, and MLX_TEST_UNSET is not set$"):
        conf_value("cfg.storage_path")
