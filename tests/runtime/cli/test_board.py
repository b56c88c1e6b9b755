"""TensorBoard displays the metrics of a run in a real browser."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Browser
from conftest import ROOT, Mlx

sys.path.insert(0, str(ROOT / "docs"))
import screenshot

pytestmark = pytest.mark.browser


def test_a_browser_shows_curves(mlx: Mlx, experiment: Callable[[str], Path], tmp_path: Path) -> None:
    folder = experiment("logging")
    done = mlx(folder, "train", "run", "cfg.start_workers=0")
    assert done.returncode == 0, done.stderr
    scratch = tmp_path / "browser"
    scratch.mkdir()
    with Browser(scratch) as browser, screenshot.board(folder, "logging", "run_001") as url:
        page = screenshot.curves(browser, url, least=4)
        words = page.evaluate("document.body.innerText")
        assert {"lr", "epoch"} <= set(words.split())
        picture = tmp_path / "page.png"
        page.picture(picture)
        assert picture.stat().st_size > 20_000
