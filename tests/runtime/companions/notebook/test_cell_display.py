"""The chart of a run in a notebook cell; test_notebook.py tests the whole cell."""

import math
import re
from xml.etree import ElementTree

import pytest

from mlx_runtime.companions.notebook.cell_display import HEIGHT, MARGIN, WIDTH, curve

pytestmark = pytest.mark.pure

SERIES = {
    "train/loss": [(1, 3.0), (2, 2.0), (3, 1.0)],
    "train/accuracy": [(1, 0.1), (2, 0.2), (3, 0.3)],
    "val/loss": [(1, 2.5), (2, math.nan), (3, 1.5)],
}


def test_it_shows_the_monitored_metric_of_all_passes() -> None:
    drawn = ElementTree.fromstring(curve(SERIES, "val/loss"))
    train, val = (line.get("points") for line in drawn if line.tag.endswith("polyline"))
    top, bottom = MARGIN, HEIGHT - MARGIN
    left, middle, right = MARGIN, WIDTH / 2, WIDTH - MARGIN
    assert train == f"{left:.1f},{top:.1f} {middle:.1f},{HEIGHT / 2:.1f} {right:.1f},{bottom:.1f}"
    assert len((val or "").split()) == 2  # without nan
    titles = [item.text for item in drawn if item.tag.endswith("text")]
    assert titles == ["train/loss 1.0000", "val/loss 1.5000", "3.0000", "1.0000", "epochs 1 to 3"]


def test_without_a_monitor_it_shows_the_first_metric() -> None:
    assert re.findall(r">([a-z]+/[a-z]+) ", curve(SERIES, "")) == ["train/loss", "val/loss"]
    assert re.findall(r">([a-z]+/[a-z]+) ", curve(SERIES, "val/missing")) == ["train/loss", "val/loss"]


@pytest.mark.parametrize("series", [{}, {"loss": [(1, 1.0)]}, {"loss": [(1, math.inf), (2, math.nan)]}])
def test_there_is_no_curve_of_fewer_than_two_points(series: dict[str, list[tuple[int, float]]]) -> None:
    assert curve(series, "loss") == ""


def test_names_are_escaped() -> None:
    assert "<b>" not in curve({"<b>": [(1, 1.0), (2, 1.0)]}, "<b>")
