"""The words of a command line that name runs."""

import pytest

from mlx_runtime.runs.folder import names_run

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("word", ["latest", "3", "digits/run_003", "s3://runs/demo?endpoint_override=x:1"])
def test_names(word: str) -> None:
    assert names_run(word)


@pytest.mark.parametrize("word", ["cfg.storage_path=s3://runs", "+cfg.a=1", "++cfg.a=1", "~cfg.callbacks", "--fast"])
def test_overrides(word: str) -> None:
    assert not names_run(word)
