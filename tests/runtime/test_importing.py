"""Where modules are imported from, and code that runs after an import."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_runtime.importing import add_to_path, after_import

pytestmark = pytest.mark.pure


def test_code_runs_once_a_module_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("early", "late"):
        (tmp_path / f"{name}.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    finders, seen = list(sys.meta_path), []
    import early  # type: ignore[import-not-found]

    after_import("early", lambda: seen.append(early.value))
    after_import("late", lambda: seen.append(sys.modules["late"].value + 1))
    after_import("late", lambda: seen.append(sys.modules["late"].value + 2))
    assert seen == [1]
    import late  # type: ignore[import-not-found]  # noqa: F401

    assert seen == [1, 2, 3]
    assert sys.meta_path == finders
    del sys.modules["early"], sys.modules["late"]


def test_a_folder_comes_before_others_with_modules_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is on the path already, like the second of two experiments in PYTHONPATH."""
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(sys, "path", [str(first), str(second)])
    add_to_path(second)
    assert sys.path == [str(second), str(first)]


@pytest.mark.process
def test_importing_the_library_hooks_nothing() -> None:
    code = (
        "import sys; before = sys.meta_path[:], sys.path_hooks[:]; import mlx_runtime; "
        "assert before == (sys.meta_path, sys.path_hooks), sys.meta_path"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
