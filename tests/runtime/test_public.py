"""The public names of `mlx_runtime`."""

import subprocess
import sys

import pytest

import mlx_runtime

pytestmark = pytest.mark.pure


def test_all_is_sorted_and_importable() -> None:
    assert mlx_runtime.__all__ == sorted(mlx_runtime.__all__, key=lambda name: (not name.isupper(), name))
    for name in mlx_runtime.__all__:
        assert getattr(mlx_runtime, name).__doc__ or name == "DUMMY_PARAMS"


@pytest.mark.process
def test_importing_the_library_hooks_nothing() -> None:
    code = (
        "import sys; before = sys.meta_path[:], sys.path_hooks[:]; import mlx_runtime; "
        "assert before == (sys.meta_path, sys.path_hooks), sys.meta_path"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
