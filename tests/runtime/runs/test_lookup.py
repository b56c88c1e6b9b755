"""Names of runs on command lines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.queries.lookup import conf_value, resolve_checkpoint, resolve_run

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("resolve", [resolve_checkpoint, resolve_run])
def test_a_folder_that_is_no_run(resolve: Callable[[str], object], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{tmp_path} is not the folder of a run; choose"):
        resolve(str(tmp_path))
    with pytest.raises(UsageError, match="^runs/digits/run_009 is not the folder of a run; choose"):
        resolve("runs/digits/run_009")


def test_a_value_of_an_unset_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLX_TEST_UNSET", raising=False)
    Path("src").mkdir()
    Path("src/conf.yaml").write_text("cfg: {storage_path: '${oc.env:MLX_TEST_UNSET}/runs'}\n")
    with pytest.raises(ConfigError, match=r"^cfg.storage_path in src/conf.yaml is .*, and MLX_TEST_UNSET is not set$"):
        conf_value("cfg.storage_path")
