"""Comparisons of two configs over seeds and folds."""

import json
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from mlx_runtime.companions.views import comparison
from mlx_runtime.companions.views.comparison import interval
from mlx_runtime.errors import MlxError, UsageError
from mlx_runtime.runs.folder import RunFolder, claim_run, find_run
from mlx_runtime.runs.records import Record

pytestmark = pytest.mark.pure

PAIRS = 200


def store(
    root: Path,
    values: Sequence[float],
    *,
    seed: int = 0,
    fold: tuple[int, int] | None = None,
    lr: str = "0.1",
    code: str = "A = 1",
    rows: int = 100,
    metric: str = "val/loss",
    **fields: Any,
) -> str:
    """Store a run with a value per epoch, and return its name."""
    folder = claim_run(str(root), "digits")
    split = {"fold": {"fold": fold[0], "folds": fold[1], "rows": f"rows{seed}-{fold[0]}"}} if fold else {}
    facts = {
        "status": "SUCCEEDED",
        "seed": seed,
        "monitor": "val/loss",
        "mode": "min",
        "datasets": {"val": {"rows": rows}},
    }
    Record(folder, **(facts | split | fields))
    lines = [{"step": epoch, "epoch": epoch, metric: value} for epoch, value in enumerate(values)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    number, folds = fold or ("null", "null")
    folder.conf.write_text(
        f"cfg:\n  seed: {seed}\n  storage_path: /{seed}\n  cross_validation: {{fold: {number}, folds: {folds}}}\n"
        f"optimizers:\n  adam: {{lr: {lr}, generator: '${{cfg.seed}}'}}\n"
    )
    with zipfile.ZipFile(folder.path / "code.zip", "w") as archive:
        archive.writestr("src/experiment.py", code)
    return folder.name


def run(root: Path, name: str) -> RunFolder:
    return find_run(str(root), "digits", name)


def compare(root: Path, a: str, b: str, **choice: Any) -> dict[str, Any]:
    return comparison.compare(run(root, a), run(root, b), **choice)


def wrong(samples: Sequence[tuple[Sequence[float], Sequence[float]]], **how: Any) -> int:
    """Return how many intervals exclude 0."""
    found = [interval(a, b, **how)[1:3] for a, b in samples]
    return sum(not low <= 0 <= high for low, high in found)


def test_comparing_a_config_with_itself_finds_a_difference_as_rarely_as_promised() -> None:
    rng = np.random.default_rng(0)
    low, high = stats.binom.interval(0.998, PAIRS, 0.05)
    seeds = [rng.normal(0, 1, 5) for _ in range(PAIRS)]  # which both have in common
    paired = [(seed + rng.normal(0, 0.3, 5), seed + rng.normal(0, 0.3, 5)) for seed in seeds]
    assert low <= wrong(paired, paired=True) <= high
    others = [(rng.normal(0, 1, 5), rng.normal(0, 3, 8)) for _ in range(PAIRS)]
    assert low <= wrong(others, paired=False) <= high


def test_folds_that_share_their_rows_find_no_differences_either() -> None:
    """Two linear models of different features, which predict equally well, cross-validated three times."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(PAIRS):
        features, losses = rng.normal(size=(60, 8)), ([], [])
        labels = features.sum(1) * 0.3 + rng.normal(size=60)
        for _ in range(3):
            folds = np.array_split(rng.permutation(60), 5)
            for number, held_out in enumerate(folds):
                train = np.concatenate(folds[:number] + folds[number + 1 :])
                for columns, found in zip((slice(0, 4), slice(4, 8)), losses, strict=True):
                    weights, *_ = np.linalg.lstsq(features[train, columns], labels[train], rcond=None)
                    found.append(float(np.mean((labels[held_out] - features[held_out, columns] @ weights) ** 2)))
        samples.append(losses)
    allowed = stats.binom.ppf(0.999, PAIRS, 0.05)
    assert wrong(samples, paired=True, folds=5) <= allowed < wrong(samples, paired=True)


def test_as_many_seeds_as_recommended_settle_a_difference_four_times_in_five() -> None:
    rng = np.random.default_rng(0)
    noise = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    seeds = interval([0] * 5, 0.6 + noise, paired=True)[-1]
    assert seeds is not None
    spread = float(np.std(noise, ddof=1))
    settled = wrong([([0.0] * seeds, rng.normal(0.6, spread, seeds)) for _ in range(PAIRS)], paired=True)
    assert abs(settled - 0.8 * PAIRS) <= 4 * math.sqrt(PAIRS * 0.8 * 0.2)


def test_a_run_stands_for_all_runs_with_its_config_and_code(tmp_path: Path) -> None:
    """Their values are those at the end of the epoch with the best mean, although one seed is better in another one."""
    for seed, (one, two) in enumerate(((0.5, 0.6), (0.6, 0.6), (0.7, 0.5))):
        store(tmp_path, [9, one, 0.1 if seed == 0 else 2], seed=seed)
        store(tmp_path, [9, two, 2], seed=seed, lr="0.2")
    store(tmp_path, [0, 0], seed=3, status="STOPPED")
    store(tmp_path, [0, 0], seed=4, code="A = 2")
    store(tmp_path, [math.nan, math.inf], seed=5)
    store(tmp_path, [9, 0.4, 2], seed=0)
    store(tmp_path, [0, 0], seed=6)
    found = compare(tmp_path, "run_003", "run_002")
    assert found["a"]["runs"] == [f"digits/run_{number:03d}" for number in (10, 3, 5)]
    assert [found[side]["values"] for side in "ab"] == [[0.4, 0.6, 0.7], [0.6, 0.6, 0.5]]
    assert [found[side]["epoch"] for side in "ab"] == [2, 2]
    assert found["left_out"] == {
        "digits/run_001": "digits/run_010 is newer, with the same seed and fold",
        "digits/run_007": "STOPPED",
        "digits/run_008": "other code than digits/run_003",
        "digits/run_009": "no finite val/loss",
        "digits/run_011": "no run of the other config has its seed and fold",
    }
    assert found["better"] is None
    assert found["config"] == {"optimizers.adam.lr": [0.1, 0.2]}
    expected = stats.ttest_rel(found["b"]["values"], found["a"]["values"]).confidence_interval(0.95)
    assert found["interval"] == pytest.approx([*expected])
    assert found["paired"]


def test_runs_without_common_seeds_are_compared_and_the_commands_lead_to_pairs(tmp_path: Path) -> None:
    for seed, value in enumerate((0.5, 0.6, 0.7, 0.55, 0.65)):
        store(tmp_path, [value], seed=seed)
        store(tmp_path, [value - 0.1], seed=seed + 6, lr="0.2")
    found = compare(tmp_path, "run_001", "run_002")
    assert (found["paired"], found["better"], found["more_seeds"]) == (False, None, 6)
    assert found["commands"] == [
        "mlx train sweep --from digits/run_001 cfg.seed=6 --seeds 6",
        "mlx train sweep --from digits/run_002 cfg.seed=0 --seeds 5",
        "mlx train sweep --from digits/run_002 cfg.seed=11 --seeds 1",
    ]
    assert "unpaired, because fewer than two seeds are the same" in "\n".join(comparison.lines(found))


def test_folds_are_paired_and_their_commands_have_folds(tmp_path: Path) -> None:
    for seed, fold in ((0, 0), (0, 1), (0, 2), (2, 0)):
        store(tmp_path, [0.5 + fold / 10], seed=seed, fold=(fold, 3))
        store(tmp_path, [0.45 + fold / 8], seed=seed, fold=(fold, 3), lr="0.2")
    found = compare(tmp_path, "run_001", "run_002", metric="val/loss")
    assert found["a"]["runs"] == [f"digits/run_00{number}" for number in (1, 3, 5, 7)]
    assert found["left_out"] == {}
    assert compare(tmp_path, "run_001", "run_002", metric="val/loss", mode="max")["difference"] == found["difference"]
    store(tmp_path, [0.4], seed=0, fold=(0, 3), lr="0.3")
    with pytest.raises(MlxError) as caught:
        compare(tmp_path, "run_001", "run_009")
    assert str(caught.value).splitlines()[1:] == [
        "mlx train sweep --from digits/run_001 cfg.seed=1 --seeds 4 --folds 3",
        "mlx train sweep --from digits/run_009 cfg.seed=0 --seeds 5 --folds 3",
    ]


@pytest.mark.parametrize(
    ("other", "kind", "error"),
    [
        ({"lr": "0.1"}, UsageError, "run_001 and digits/run_003 have the same config and code; name runs that differ"),
        (
            {"mode": "max"},
            UsageError,
            "The runs monitor val/loss \\(max\\) and val/loss \\(min\\); pass --metric and --mode",
        ),
        (
            {"monitor": "val/f1"},
            UsageError,
            r"The runs monitor val/f1 \(min\) and val/loss \(min\); pass",
        ),
        ({"metric": "val/lss"}, UsageError, "no run like digits/run_004 has a finite val/loss"),
        ({"status": "RUNNING"}, MlxError, "no run with the config of digits/run_003 has finished; it is RUNNING"),
        ({"rows": 99}, MlxError, "the configs were evaluated on 100 and 99 rows of val"),
    ],
)
def test_bad_input(tmp_path: Path, other: dict[str, Any], kind: type[MlxError], error: str) -> None:
    for seed in (0, 1):
        store(tmp_path, [0.5 + seed], seed=seed)
    for seed in (0, 1):
        store(tmp_path, [0.6 + seed], seed=seed, **({"lr": "0.2"} | other))
    with pytest.raises(kind, match=error):
        compare(tmp_path, "run_001", "run_003")


def test_one_seed_on_one_side_has_no_interval(tmp_path: Path) -> None:
    for seed in (0, 1, 3):
        store(tmp_path, [0.5 + seed], seed=seed)
    store(tmp_path, [0.6], seed=1, lr="0.2")
    with pytest.raises(MlxError) as caught:
        compare(tmp_path, "run_001", "run_004")
    assert str(caught.value).splitlines() == [
        "digits/run_004 has one seed to compare, and an interval needs two; train more:",
        "mlx train sweep --from digits/run_001 cfg.seed=4 --seeds 2",
        "mlx train sweep --from digits/run_004 cfg.seed=0 --seeds 1",
        "mlx train sweep --from digits/run_004 cfg.seed=3 --seeds 3",
    ]


def test_equal_differences_of_different_values_settle_nothing() -> None:
    """Of an accuracy over 270 rows, for example; but if no seed changes a value, the difference is certain."""
    a, b = ([float(np.float32(rows / 270)) for rows in found] for found in ((261, 259, 262), (263, 261, 264)))
    assert interval(a, b, paired=True)[-1] == 4
    assert interval([0.1] * 3, [0.2] * 3, paired=True)[-1] is None
