"""The web page of a sweep, in a real browser without a network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page
from stored_sweeps import LR, store_run, store_search, store_sweep

from mlx_runtime.companions.sweeps.report import render_sweep
from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.companions.views import report
from mlx_runtime.runs.folder import RunFolder

pytestmark = pytest.mark.browser

TEXT = "document.body.innerText"
DRAWN = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"
TITLES = "[...document.querySelectorAll('h2')].map(item => item.innerText)"
POINTS = "[...document.querySelectorAll('.plot')].map(plot => plot.querySelectorAll('.point').length)"
LINES = "[...document.querySelectorAll('.plot')].map(plot => plot.querySelectorAll('path.js-line').length)"

EVIL = "</script><img src=x onerror='window.pwned=1'><script>window.pwned=1</script>%{x}<b>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A sweep of 24 trials, of which some were pruned and one failed."""
    return store_search(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Any:
    """`open_page(folder)` opens the page of a sweep; it has no errors and requests nothing."""

    def open_page(folder: RunFolder) -> Page:
        report.write(render_sweep(SweepResult(folder)), tmp_path / "page.html")
        page = browser.page()
        page.open(tmp_path / "page.html")
        page.evaluate(DRAWN)
        assert page.errors() == []
        assert page.requests() == []
        return page

    return open_page


def test_all_charts_are_drawn_and_the_table_has_the_best_first(open_page: Any, searched: RunFolder) -> None:
    page, result = open_page(searched), SweepResult(searched)
    assert page.evaluate(TITLES) == [
        *("Parallel coordinates", "Parameters", "Importance of parameters", "Learning curves", "Trials")
    ]
    titles = page.evaluate("[...document.querySelectorAll('h3')].map(item => item.innerText)")
    keys = [LR, "models.net.width", "models.net.activation"]
    statuses = [trial.status for trial in result.trials]
    finished = statuses.count("SUCCEEDED")
    assert titles == [f"{finished} finished trials", *keys, "share of the variance", "val/loss"]
    assert page.evaluate(POINTS)[1:5] == [finished] * 3 + [3]
    assert page.evaluate(LINES)[0] == finished
    assert page.evaluate(LINES)[-1] == len(statuses) - statuses.count("FAILED")
    rows = page.evaluate(
        "[...document.querySelectorAll('tr')].map(row =>"
        " [...row.querySelectorAll('th, td')].map(cell => cell.innerText))"
    )
    assert rows[0][:6] == ["trial", "status", "lr", "width", "activation", "epoch"]
    assert rows[0][6:] == ["val/loss", "took", "runs", "train/loss", "val/accuracy"]
    assert rows[1][:2] == [str(result.best.number), "SUCCEEDED"]
    assert [row[0] for row in rows[1:]] == [str(trial.number) for trial in result.ranked()]
    assert page.evaluate("getComputedStyle(document.querySelector('tr.best td'), '::after').content") == '" best"'
    text = page.evaluate(TEXT)
    for item in (
        *("1 FAILED", "optuna, scheduler asha", "val/loss (min)", result.command, searched.location),
        *(f"in trial {result.best.number}, epoch {result.best.epoch}", "Trial 7: ValueError: the loss is not finite"),
    ):
        assert item in text, item
    assert "worker_loop" not in text  # until it is opened


def test_what_a_sweep_says_stays_text(open_page: Any, tmp_path: Path) -> None:
    root = str(tmp_path / "runs")
    runs = [store_run(root, {"val/loss": [loss], EVIL: [1.0]}, error=EVIL) for loss in (0.5, 0.4)]
    trials = [{"values": {EVIL: f"{EVIL}{number}", "a": str(number)}, "runs": [run]} for number, run in enumerate(runs)]
    folder = store_sweep(root, trials, search=EVIL, overrides=[EVIL, "a=0,1"])
    page = open_page(folder)
    page.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
    assert page.evaluate("window.pwned === undefined && !document.querySelector('img, main script, main b, iframe')")
    assert page.evaluate(TEXT).count(EVIL) >= 8
    ticks = page.evaluate("document.querySelectorAll('.plot')[1].querySelector('.xtick text').textContent")
    assert ticks == f'"{EVIL}0"'
