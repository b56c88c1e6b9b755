"""Trackers write the reports of a run in the format of their tool, which can read them."""

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mlx_runtime.companions.services.csv_file import CSV
from mlx_runtime.companions.services.mlflow import MLflow
from mlx_runtime.companions.services.weights_and_biases import WandB
from mlx_runtime.companions.views.report import FACTS
from mlx_runtime.events import CheckpointSaved
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import join_path
from mlx_runtime.tracking.callbacks import RunInfo
from mlx_runtime.tracking.trackers import JSONL, ReportWriter, TensorBoard

pytestmark = pytest.mark.pure

CONFIG = {
    "cfg": {"seed": 7, "name": "digits", "monitor": "acc", "mode": "max"},
    "models": {"net": {"widths": [1, 2], "p@1": 0}},
}


def begun(
    folder: Path, attempt: int = 1, warn: Callable[[str], object] = pytest.fail, /, **trackers: object
) -> ReportWriter:
    info = RunInfo("digits", "run_001", folder, str(folder), CONFIG, attempt)
    tracking = ReportWriter(info, RunFolder(folder), trackers, warn)
    tracking.start()
    return tracking


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard's own reader finds."""
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(item.step, item.value) for item in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_the_record_of_a_run(tmp_path: Path) -> None:
    with begun(tmp_path) as tracking:
        tracking.report({"train/loss": 0.5, "lr/adam": 0.1}, step=10, epoch=0)
        tracking.report({"train/loss": math.nan}, step=20, epoch=1)
    first, second = lines(tmp_path / "metrics.jsonl")
    assert list(first) == ["step", "epoch", *FACTS, "train/loss", "lr/adam"]
    assert (first["step"], first["epoch"], first["training_iteration"], second["training_iteration"]) == (10, 0, 1, 2)
    assert second["train/loss"] is None
    assert second["time_total_s"] >= first["time_this_iter_s"] > 0
    assert first["date"].endswith("+00:00")


def test_a_run_that_goes_on_continues_every_series(tmp_path: Path) -> None:
    def trackers() -> dict[str, object]:
        return {"tensorboard": TensorBoard(hparams=False), "csv": CSV(), "more": JSONL("more.jsonl")}

    with begun(tmp_path, **trackers()) as tracking:
        tracking.report({"train/loss": 3.0}, step=1, epoch=0)
        state = json.loads(json.dumps(tracking.state()))
        tracking.report({"train/loss": 9.0}, step=2, epoch=0)  # lost: after the checkpoint
        tracking.end("FAILED", {}, RuntimeError("killed"))
    for _ in range(2):  # an experiment may also restore by itself
        tracking = ReportWriter(
            RunInfo("digits", "run_001", tmp_path, str(tmp_path), CONFIG, 2),
            RunFolder(tmp_path),
            trackers(),
            pytest.fail,
        )
        tracking.rewind(state, 1)
    with tracking:
        tracking.start()
        tracking.report({"train/loss": 2.0}, step=2, epoch=0)
        tracking.trackers.call("on_epoch_end", 0, {})
        tracking.report({"train/loss": 1.0, "val/acc": 0.5}, step=3, epoch=1)
        tracking.end("SUCCEEDED", {"train/loss": 1.0})
    expected = [(1, 3.0), (2, 2.0), (3, 1.0)]
    for name in ("metrics.jsonl", "more.jsonl"):
        rows = lines(tmp_path / name)
        assert [(row["step"], row["train/loss"]) for row in rows] == expected
        assert [row["training_iteration"] for row in rows] == [1, 2, 3]
        assert rows[2]["time_total_s"] > rows[0]["time_total_s"]
    assert scalars(tmp_path) == {
        "train/loss": expected,
        "epoch": [(1, 0.0), (2, 0.0), (3, 1.0)],
        "val/acc": [(3, 0.5)],
    }
    with (tmp_path / "metrics.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [(int(row["step"]), float(row["train/loss"]), row["val/acc"]) for row in table] == [
        (1, 3.0, ""),
        (2, 2.0, ""),
        (3, 1.0, "0.5"),
    ]


def test_tensorboard_takes_more_than_numbers(tmp_path: Path) -> None:
    with begun(tmp_path, tensorboard=TensorBoard()) as tracking:
        writer = tracking.tensorboard
        writer.add_image("sample", torch.rand(1, 4, 4), 1)
        writer.add_histogram("weights", torch.randn(100), 1)
        writer.add_text("note", "hello", 1)
        writer.add_graph(torch.nn.Linear(2, 1), torch.zeros(1, 2))
        tracking.report({"val/acc": 0.5}, step=1, epoch=0)
        tracking.end("SUCCEEDED", {"val/acc": 0.5})
    found = EventAccumulator(str(tmp_path)).Reload()
    tags = found.Tags()
    assert (tags["images"], tags["histograms"], tags["graph"]) == (["sample"], ["weights"], True)
    assert tags["tensors"] == ["note/text_summary"]
    started = found.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert b"cfg.seed" in started
    assert b"models.net.widths.1" in started


def records(log: bytes) -> Iterator[bytes]:
    """Read a file of Weights & Biases: LevelDB's log format, with blocks of 32 KiB after a header of 7 bytes."""
    place, parts = 7, b""
    while place + 7 <= len(log):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        parts += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def sent(folder: Path, kind: str) -> list[Any]:
    """Return what the offline logs of a run hold of a kind, such as `run`, the logs in the order of their attempts."""
    from wandb.proto.wandb_internal_pb2 import Record

    logs = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    found = [Record.FromString(data) for log in logs for data in records(log.read_bytes())]
    return [getattr(record, kind) for record in found if record.HasField(kind)]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", "")  # what the tracker sets ends with the test
    monkeypatch.delenv("WANDB_DATA_DIR")


def save(root: str, tracking: ReportWriter, epoch: int, accuracy: float | None, *, finished: bool = True) -> None:
    item = CheckpointInfo(epoch, finished, 10, {} if accuracy is None else {"acc": accuracy})
    CheckpointStore(root).save({"epoch": epoch}, item)
    tracking.trackers.handle(CheckpointSaved(epoch, finished, 10, join_path(root, item.name), item.metrics))


@pytest.mark.process
@pytest.mark.usefixtures("offline")
def test_weights_and_biases_offline(tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")
    for attempt, accuracies in ((1, [0.5, 0.9]), (2, [0.7])):
        with begun(tmp_path, attempt, wandb=WandB(checkpoints=True)) as tracking:
            tracking.report({"train/loss": 0.5 / attempt}, step=10 * attempt, epoch=attempt)
            for number, accuracy in enumerate(accuracies):
                save(root, tracking, 2 * attempt + number, accuracy)
            save(root, tracking, 3 + attempt, 0.95 if attempt == 2 else None, finished=False)
            tracking.end("SUCCEEDED", {"train/loss": 0.5})
    rows = [{item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in sent(tmp_path, "history")]
    assert [(row["global_step"], row["epoch"], row["train/loss"]) for row in rows] == [(10, 1, 0.5), (20, 2, 0.25)]
    runs, versions = sent(tmp_path, "run"), sent(tmp_path, "artifact")
    assert [run.run_id for run in runs] == [(tmp_path / "wandb-run-id").read_text()] * 2
    for run in runs:
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config.items() >= CONFIG.items()
    assert {item.name for item in versions} == {f"checkpoints-{runs[0].run_id}"}
    assert [set(item.aliases) for item in versions] == [
        {"latest", "epoch_0003", "best"},
        {"latest", "epoch_0004", "best"},
        {"latest", "epoch_0005"},
        {"latest", "epoch_0006_step_00000010", "best"},
    ]
    assert json.loads(versions[1].metadata) == {"epoch": 3, "global_step": 10, "acc": 0.9}
    for item, name in zip(
        versions, ("epoch_0003", "epoch_0004", "epoch_0005", "epoch_0006_step_00000010"), strict=True
    ):
        copies = {Path(file.path): Path(file.local_path) for file in item.manifest.contents}
        stored = {Path(file.name): file.read_bytes() for file in Path(root, name).iterdir()}
        assert {file: copy.read_bytes() for file, copy in copies.items()} == stored
        assert all(copy.is_relative_to(tmp_path / "wandb" / "artifacts") for copy in copies.values())


def test_mlflow_in_a_local_store(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    told: list[str] = []
    for attempt in (1, 2):
        tracker = MLflow()
        with begun(tmp_path, attempt, told.append, mlflow=tracker) as tracking:
            refused = {"acc@1": 1.0} if attempt == 1 else {"acc@1": 1.0, "acc@5": 2.0}
            for step in (10 * attempt, 10 * attempt + 5):
                values = {"train/loss": 0.5 / attempt, "val/acc": math.nan, **refused}
                tracking.report(values, step=step, epoch=attempt)
            tracking.report({"acc@9": 3.0}, step=10 * attempt + 6, epoch=attempt)
            tracking.end("SUCCEEDED" if attempt == 2 else "STOPPED", {})
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(item.step, item.value) for item in history] == [(10, 0.5), (15, 0.5), (20, 0.25), (25, 0.25)]
    start = "cfg.trackers.mlflow failed in on_report, the run continues: MLflow does not accept the names "
    names = [text.removeprefix(start).partition(". For ")[0] for text in told]
    assert names == ["models.net.p@1, acc@1", "acc@9", "acc@1, acc@5", "acc@9"]  # of each attempt
    assert run.info.status == "FINISHED"
    assert (run.data.params["cfg.seed"], run.data.params["models.net.widths.1"]) == ("7", "2")


def test_one_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    told: list[str] = []
    info = RunInfo("digits", "run_001", tmp_path, str(tmp_path), CONFIG, 1)
    with ReportWriter(info, RunFolder(tmp_path), {"it": MLflow()}, told.append) as tracking:
        tracking.start()
        tracking.report({"loss": 1.0}, step=1, epoch=0)
        tracking.end("SUCCEEDED", {})
    assert len(told) == 1
    why = 'it needs mlflow; type: pip install "mlx-runtime[mlflow]"'
    assert told[0].startswith(f"cfg.trackers.it failed in on_run_start, the run continues without it: {why}")
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_resuming_over_a_damaged_record_keeps_its_rows_and_sets_the_file_aside(tmp_path: Path) -> None:
    with begun(tmp_path) as tracking:
        tracking.report({"train/loss": 3.0}, step=1, epoch=0)
        tracking.report({"train/loss": 2.0}, step=2, epoch=1)
        state = tracking.state()
    file, told = tmp_path / "metrics.jsonl", []
    first, second = file.read_bytes().splitlines(keepends=True)

    def resumed() -> list[int]:
        info = RunInfo("digits", "run_001", tmp_path, str(tmp_path), CONFIG, 2)
        with ReportWriter(info, RunFolder(tmp_path), {}, told.append) as tracking:
            tracking.rewind(state, 2)
            tracking.start()
            tracking.report({"train/loss": 1.0}, step=3, epoch=2)
        return [row["step"] for row in lines(file)]

    assert resumed() == [1, 2, 3]
    assert told == []
    for damaged, kept in ((b"\xff\xfe\x00{}\nnope\n" + second, [2, 3]), (first, [1, 3])):
        file.write_bytes(damaged)
        assert resumed() == kept
        aside = next(tmp_path.glob("damaged_metrics.jsonl_*"))
        assert told == [f"metrics.jsonl is damaged; it was renamed to {aside.name}, and its readable rows (1) are kept"]
        told.clear()
        assert aside.read_bytes() == damaged
        aside.unlink()
