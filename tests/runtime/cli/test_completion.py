"""Completion of commands, experiments and runs in a shell."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_runtime.runs.folder import claim_run

pytestmark = pytest.mark.process


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    for name in ("digits", "digits", "dogs"):
        claim_run(str(tmp_path), name)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("mlx tr", {"train"}),
        ("mlx xp lo", {"logs"}),
        ("mlx xp logs d", {"digits", "dogs"}),
        ("mlx xp logs dog", {"dogs"}),
        ("mlx xp stop digits run_", {"run_001", "run_002"}),
        ("mlx xp logs digits la", {"latest"}),
        ("mlx train launch --ray", {"--ray-address"}),
    ],
)
def test_words(typed: str, completed: set[str], storage: Path, environment: dict[str, str]) -> None:
    """Request completions as bash does, with the output of `_MLX_COMPLETE=bash_source mlx`."""
    asked = {"_MLX_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = subprocess.run(
        [Path(sys.executable).with_name("mlx")],
        env=environment | asked | {"MLX_STORAGE": str(storage)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == completed, done.stderr
