"""Web pages about runs, in a real browser without a network."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page
from conftest import Mlx

from mlx_runtime.companions.views import report
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder, claim_run
from mlx_runtime.storage import documents
from mlx_runtime.storage.files import size_text

pytestmark = pytest.mark.browser

CURVES = "document.querySelectorAll('.plot .scatterlayer .trace path.js-line').length"
TEXT = "document.body.innerText"
DRAWN = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"

TIMES = ("step_s", "data_wait_pct", "epoch_s")

EVIL = "</script><img src=x onerror='window.pwned=1'><script>window.pwned=1</script>%{x}<b>\u2028"
"""Texts that would change a page without escaping."""

EVIL_NAME = "<b>%{x}<img src=x onerror='window.pwned=1'>"
"""The same for names of folders, and of curves, which Plotly would interpret as markup."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def trained(mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the template's experiment, two epochs."""
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("trained") / "digits"))
    overrides = ("cfg.start_workers=0", "cfg.num_epochs=2", "cfg.monitor=val/accuracy", "cfg.mode=max")
    overrides += ("cfg.log_every_steps=5",)
    done = mlx(folder, "train", "run", *overrides)
    assert done.returncode == 0, done.stderr
    return folder / "runs/digits/run_001"


@pytest.fixture(scope="module")
def page_of_run(trained: Path, mlx: Mlx) -> Path:
    """The report that `mlx xp report` writes of it."""
    done = mlx(trained.parents[2], "xp", "report", "digits")
    assert (done.returncode, done.stdout) == (0, f"{trained}/report.html\n"), done.stderr
    return trained / "report.html"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with texts that try to change the page, in every field that the page displays."""
    folder = claim_run(str(tmp_path / EVIL_NAME), f"digits{EVIL_NAME}")
    numbers = {f"train/{EVIL}": 0.5, f"{EVIL_NAME}/loss": 0.25}
    facts: dict[str, Any] = dict.fromkeys(("command", "device", "host", "python", "error", "monitor"), EVIL)
    facts |= {"status": "FAILED", "overrides": [EVIL], "git": {"commit": EVIL, "diff": EVIL}}
    facts |= {
        "packages": {EVIL: EVIL},
        "job": {"id": EVIL, "address": EVIL},
        "metrics": numbers,
        "start": documents.now(),
    }
    records.Record(folder, **facts, epoch=1, epochs=2, best={"epoch": 0, "value": 0.5, "path": EVIL})
    lines = [{"step": step, "epoch": 0, "timestamp": 0.0} | numbers for step in (1, 2, 3)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.conf.write_text(EVIL)
    (folder.path / "logs").mkdir()
    (folder.path / "logs/driver.log").write_text(EVIL)
    CheckpointStore(folder.checkpoints).save({}, CheckpointInfo(0, True, 3, numbers))
    return folder


def opened(browser: Browser, file: Path) -> Page:
    """Open a file in a page, and assert that there are no errors and no requests."""
    page = browser.page()
    page.open(file)
    page.evaluate(DRAWN)
    assert page.errors() == []
    assert page.requests() == []
    return page


class TestOfARun:
    def test_its_curves_are_drawn(self, browser: Browser, page_of_run: Path) -> None:
        page = opened(browser, page_of_run)
        titles = page.evaluate("[...document.querySelectorAll('h3')].map(item => item.innerText)")
        assert titles == ["accuracy", "cross_entropy", "f1", "confidence", "lr", "samples_per_s", *TIMES]
        charts = page.evaluate(
            "[...document.querySelectorAll('.plot')].map(plot => ["
            " [...plot.querySelectorAll('.legendtext')].map(item => item.textContent),"
            " [...plot.querySelectorAll('path.js-line')].map(line => line.getTotalLength()),"
            " plot.querySelectorAll('.point').length])"
        )
        legend, lengths, points = charts[0]
        assert legend == ["train", "train interval", "val", "test"]
        assert min(lengths[:3]) > 50  # pixels; there is one point of the test set
        assert points >= 11
        assert charts[4][0] == ["adam"]

    def test_all_that_is_known_is_there_to_read(self, browser: Browser, page_of_run: Path, trained: Path) -> None:
        page = opened(browser, page_of_run)
        text = page.evaluate(TEXT)
        record = json.loads((trained / "run.json").read_text())
        stored = trained / "checkpoints" / "epoch_0001" / "state.pt"
        best = f"val/accuracy {record['best']['value']:.4f} (epoch {record['best']['epoch'] + 1})"
        for item in (
            *("digits/run_001", "SUCCEEDED", "2/2", best, record["command"], record["host"], "21,482", str(trained)),
            *("epoch_0001", "epoch_0002", "latest", "best", size_text(stored.stat().st_size)),
            *("_target_: src.models.DigitsNet", "monitor: val/accuracy"),
            *("1/2", "TensorBoard"),
        ):
            assert item in text, item
        page.evaluate("document.querySelector('details').open = true")
        assert record["packages"]["torch"] in page.evaluate(TEXT)

    def test_what_a_run_says_stays_text(self, browser: Browser, run: RunFolder, tmp_path: Path) -> None:
        file = tmp_path / "page.html"
        report.write(report.render_run(run), file)
        page = opened(browser, file)
        page.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
        assert page.evaluate(
            "window.pwned === undefined && !document.querySelector('img, main script, main b, iframe')"
        )
        shown = EVIL.removesuffix("\u2028")
        assert page.evaluate(TEXT).count(shown) >= 14
        assert page.evaluate(CURVES) == 2
        legends = page.evaluate("[...document.querySelectorAll('.legendtext')].map(item => item.textContent)")
        assert sorted(legends) == [EVIL_NAME, "train"]


@pytest.mark.pure
def test_keys_in_addresses_are_not_shown(tmp_path: Path) -> None:
    folder = claim_run(str(tmp_path), "digits")
    records.Record(folder, status="FAILED", command="mlx train run cfg.storage_path=s3://KEY:SECRET@bucket/runs")
    folder.conf.write_text("storage_path: 's3://KEY:SECRET@bucket/runs'\n")
    text = report.render_run(folder)
    assert "SECRET" not in text
    assert "s3://…@bucket/runs" in text


def test_a_page_goes_through_what_is_no_file_of_its_own(tmp_path: Path) -> None:
    """As root, replacing /dev/stdout or /dev/null by a file would break the machine."""
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    report.write("page", pipe)
    assert os.read(reader, 100) == b"page"
    os.close(reader)
    assert pipe.is_fifo()
    target.write_text("old")
    link.symlink_to(target)
    report.write("page \ud800", link)
    assert link.is_symlink()
    assert target.read_text() == "page \\ud800"
