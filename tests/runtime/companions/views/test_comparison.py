"""Comparisons of two configs over seeds and folds."""

import itertools
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
from mlx_runtime.storage.leases import lease

pytestmark = pytest.mark.pure

SAMPLES = 200


@pytest.fixture(autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the code of the runs."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "src").mkdir()
    (folder / "src" / "experiment.py").write_text("A = 1")
    monkeypatch.chdir(folder)
    return folder


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
    test: Sequence[float] = (),
    **fields: Any,
) -> str:
    """Store a run with a value per epoch, and return its name."""
    folder = claim_run(str(root), "digits")
    split = {"fold": {"fold": fold[0], "folds": fold[1], "rows": f"rows{seed}-{fold[0]}-{rows}"}} if fold else {}
    facts = {
        "status": "SUCCEEDED",
        "seed": seed,
        "monitor": "val/loss",
        "mode": "min",
        "datasets": {"val": {"rows": rows}},
    }
    Record(folder, **(facts | split | fields))
    lines = [{"step": epoch, "epoch": epoch, metric: value} for epoch, value in enumerate(values)]
    lines += [
        {"step": epoch, "epoch": epoch, "test/loss": value} for epoch, value in enumerate(test) if not math.isnan(value)
    ]
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


def wrong(samples: Sequence[tuple[Sequence[float], Sequence[float]]], folds: int = 1) -> int:
    """Return how many intervals exclude 0."""
    found = [interval(a, b, folds)[:2] for a, b in samples]
    return sum(low < high and not low <= 0 <= high for low, high in found)


def test_comparing_a_config_with_itself_finds_a_difference_as_rarely_as_promised(tmp_path: Path) -> None:
    """With the values of seeds that both have in common: numbers, and accuracies over few rows."""
    names = [[store(tmp_path, [0], seed=seed, lr=lr) for seed in range(5)] for lr in ("0.1", "0.2")]
    rng, verdicts = np.random.default_rng(0), []
    for number in range(60):  # each takes a tenth of a second
        common = rng.normal(size=5)
        for runs in names:
            noise = rng.binomial(20, 0.8, 5) / 20 if number % 2 else common + rng.normal(0, 0.3, 5)
            for name, value in zip(runs, noise, strict=True):
                line = json.dumps({"step": 0, "epoch": 0, "val/loss": value})
                (tmp_path / "digits" / name / "metrics.jsonl").write_text(f"{line}\n")
        verdicts.append(compare(tmp_path, names[0][0], names[1][0])["better"])
    assert len(verdicts) - verdicts.count(None) <= stats.binom.ppf(0.999, len(verdicts), 0.05)


def test_folds_that_share_their_rows_find_no_differences_either() -> None:
    """Two linear models of different features, which predict equally well, cross-validated three times."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(SAMPLES):
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
    allowed = stats.binom.ppf(0.999, SAMPLES, 0.05)
    assert wrong(samples, folds=5) <= allowed < wrong(samples)


def test_as_many_seeds_as_recommended_settle_a_difference_four_times_in_five() -> None:
    rng = np.random.default_rng(0)
    noise = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    seeds = interval([0] * 5, 0.6 + noise)[-1]
    assert seeds is not None
    spread = float(np.std(noise, ddof=1))
    settled = wrong([([0.0] * seeds, rng.normal(0.6, spread, seeds)) for _ in range(SAMPLES)])
    assert abs(settled - 0.8 * SAMPLES) <= 4 * math.sqrt(SAMPLES * 0.8 * 0.2)


def test_a_run_stands_for_all_runs_with_its_config_and_code(tmp_path: Path) -> None:
    """Their values are those at the end of the epoch with the best mean, although one seed is better in another one."""
    pairs = ((0.5, 0.6), (0.6, 0.6), (0.7, 0.5), (0.7, 0.9), (0.5, 0.6))
    for seed, (one, two) in enumerate(pairs):
        store(tmp_path, [9, one, 0.1 if seed == 0 else 2], seed=seed)
        store(tmp_path, [9, two, 2], seed=seed, lr="0.2")
    store(tmp_path, [0, 0], seed=5, status="STOPPED")
    store(tmp_path, [0, 0], seed=6, code="A = 2")
    store(tmp_path, [math.nan, math.inf], seed=7)
    store(tmp_path, [9, 0.4, 2], seed=0)
    store(tmp_path, [0, 0], seed=8)
    (run(tmp_path, store(tmp_path, [0, 0], seed=9)).path / "code.zip").unlink()
    run(tmp_path, store(tmp_path, [0, 0], seed=10)).conf.write_text("cfg: [")
    found = compare(tmp_path, "run_003", "run_002")
    assert found["a"]["runs"] == [f"digits/run_{number:03d}" for number in (3, 5, 7, 9, 14)]
    assert [found[side]["values"] for side in "ab"] == [[0.6, 0.7, 0.7, 0.5, 0.4], [0.6, 0.5, 0.9, 0.6, 0.6]]
    assert found["epochs"] == [2, 2]
    reasons = {title.removeprefix("digits/"): reason for title, reason in found["left_out"].items()}
    assert "cannot read" in reasons.pop("run_017")
    assert "run_016 has no stored code" in reasons.pop("run_016")
    assert reasons.pop("run_012").startswith("other code than digits/run_003: ")
    assert reasons == {
        "run_001": "digits/run_014 is newer, with the same seed and fold",
        "run_011": "STOPPED",
        "run_013": "no finite val/loss",
        "run_015": "the other config lacks its seed, fold or rows",
    }
    assert found["better"] is None
    assert found["config"] == {"optimizers.adam.lr": ["0.1", "0.2"]}
    expected = stats.ttest_rel(found["b"]["values"], found["a"]["values"]).confidence_interval(0.95)
    assert found["interval"] == pytest.approx([*expected])
    assert "(5 pairs of the same seed)" in "\n".join(comparison.lines(found))


def test_runs_that_stopped_early_are_compared_by_their_own_best_epochs(tmp_path: Path) -> None:
    """B is better, although A is better in the only epoch that all runs have reached. A test is recorded once."""
    for seed in range(5):
        noise = seed / 100
        test = [math.nan] * (seed + 1)
        store(tmp_path, [0.8, *[0.5 + noise] * (seed + 1)], seed=seed, test=[*test, 0.7 + noise])
        store(tmp_path, [0.9, *[0.4 + 2 * noise] * (5 - seed), 0.6], seed=seed, lr="0.2", test=[*test, 0.2 - noise])
    found = compare(tmp_path, "run_001", "run_002")
    assert (found["b"]["values"], found["epochs"]) == (pytest.approx([0.4, 0.42, 0.44, 0.46, 0.48]), None)
    assert found["better"] == "b"
    tested = compare(tmp_path, "run_001", "run_002", metric="test/loss", mode="max")
    assert (tested["a"]["values"], tested["better"]) == (pytest.approx([0.7, 0.71, 0.72, 0.73, 0.74]), "a")


def test_too_few_seeds_have_no_winner_but_commands(tmp_path: Path, project: Path) -> None:
    """Those of a seed that only one config has come first, and those that train now are left out."""
    for seed in range(4):
        store(tmp_path, [0.5 + seed / 100], seed=seed)
        store(tmp_path, [0.1], seed=seed, lr="0.2")
    store(tmp_path, [0.5], seed=4)
    found = compare(tmp_path, "run_001", "run_002")
    assert (found["better"], found["interval"]) == (None, [-math.inf, math.inf])
    assert found["result"] == "not settled with 4 of 5 seeds; compare once, after the others have finished"
    metric = "--metric val/loss --mode min"
    assert found["commands"] == [f"mlx train sweep --from digits/run_002 cfg.seed=4 --seeds 1 {metric}"]
    store(tmp_path, [0.1], seed=4, lr="0.2", **(lease() | {"status": "RUNNING"}))
    assert compare(tmp_path, "run_001", "run_002")["commands"] == []
    name = store(tmp_path, [0.1], seed=7, lr="0.3")
    assert compare(tmp_path, "run_001", name)["commands"] == [
        f"mlx train sweep --from digits/{name} cfg.seed=0 --seeds 5 {metric}"
    ]
    (project / "src" / "experiment.py").write_text("A = 2")
    assert compare(tmp_path, "run_001", name)["commands"] == [f"first check out the code of digits/{name}"]


def test_folds_are_paired_if_they_held_out_the_same_rows(tmp_path: Path) -> None:
    for seed, fold in itertools.product(range(5), range(3)):
        store(tmp_path, [0.5 + fold / 10], seed=seed, fold=(fold, 3))
        store(tmp_path, [0.3 + fold / 8 + seed / 100], seed=seed, fold=(fold, 3), lr="0.2")
    found = compare(tmp_path, "run_001", "run_002")
    assert len(found["a"]["runs"]) == 15
    assert found["left_out"] == {}
    assert "(15 pairs of the same seed and fold)" in "\n".join(comparison.lines(found))
    parts = itertools.product(range(5), range(3))
    other = [store(tmp_path, [0.4], seed=seed, fold=(fold, 3), lr="0.3", rows=9) for seed, fold in parts]
    found = compare(tmp_path, "run_001", other[0])
    assert found["a"]["runs"] == []
    assert found["commands"] == [
        f"mlx train sweep --from digits/{name} cfg.seed=5 --seeds 5 --folds 3 --metric val/loss --mode min"
        for name in ("run_001", other[0])
    ]
    store(tmp_path, [0.4], lr="0.4")
    with pytest.raises(MlxError, match="the runs have 1 and 3 folds"):
        compare(tmp_path, "run_001", "latest")


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ([0.5] * 5, [0.6] * 5, "not settled: the seeds do not differ"),
        (np.float32([0.2, 0.4, 0.6, 0.8, 0.1]), np.float32([0.3, 0.5, 0.7, 0.9, 0.2]), "do not differ"),
        ([0, 1, 2, 3, 4], [1, 0, 2, 4, 3], "for a difference this small, 100 seeds would not be enough"),
        ([1.5e308, -1.5e308] * 3, [-1.5e308, 1.5e308] * 3, "not settled"),
    ],
)
def test_values_that_settle_nothing(tmp_path: Path, a: Sequence[float], b: Sequence[float], text: str) -> None:
    """Equal differences are no proof: those of accuracies over few rows, which are equal by chance, for example."""
    for seed, values in enumerate(zip(a, b, strict=True)):
        for lr, value in zip(("0.1", "0.2"), values, strict=True):
            store(tmp_path, [float(value)], seed=seed, lr=lr)
    found = compare(tmp_path, "run_001", "run_002")
    assert (found["better"], text in comparison.lines(found)[-1 - len(found["commands"])]) == (None, True)


def test_numbers_of_other_types_are_other_configs(tmp_path: Path) -> None:
    names = [store(tmp_path, [0.5], lr=lr) for lr in ("1", "1.0", "true")]
    for other, value in zip(names[1:], ("1.0", "True"), strict=True):
        assert compare(tmp_path, names[0], other)["config"] == {"optimizers.adam.lr": ["1", value]}


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"lr": "0.1"}, "run_001 and digits/run_003 have the same config and code; name runs that differ"),
        ({"metric": "val/lss"}, "no run like digits/run_003 has a finite val/loss"),
    ],
)
def test_bad_input(tmp_path: Path, other: dict[str, Any], error: str) -> None:
    for seed in (0, 1):
        store(tmp_path, [0.5 + seed], seed=seed)
    for seed in (0, 1):
        store(tmp_path, [0.6 + seed], seed=seed, **({"lr": "0.2"} | other))
    with pytest.raises(UsageError, match=error):
        compare(tmp_path, "run_001", "run_003")
    with pytest.raises(UsageError, match="digits/run_001 monitors val/loss; pass --metric"):
        compare(tmp_path, "run_001", store(tmp_path, [1], lr="1"), metric="val/f1")
