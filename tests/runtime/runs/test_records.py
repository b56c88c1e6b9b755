"""The record of a run."""

import datetime
import itertools
import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_runtime.cli.verbs import xp
from mlx_runtime.companions.stores.object_store import ObjectStore
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.runs import drivers, records
from mlx_runtime.runs.folder import RunFolder, claim_run, run_folder
from mlx_runtime.runs.logs import LogFile
from mlx_runtime.runs.queries.lookup import resolve_run
from mlx_runtime.storage import files, leases

pytestmark = pytest.mark.pure


def fields(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_a_living_run_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.05)
    beats = itertools.count()
    monkeypatch.setattr(records, "now", lambda: next(beats))
    record = records.Record(RunFolder(tmp_path))
    first = fields(tmp_path)["heartbeat"]
    until, before = time.monotonic() + 60, {*threading.enumerate()}
    with record.alive():
        while fields(tmp_path)["heartbeat"] == first and time.monotonic() < until:
            time.sleep(0.01)
    assert fields(tmp_path)["heartbeat"] > first
    assert "heartbeat" not in {thread.name for thread in {*threading.enumerate()} - before}


def test_the_end_is_written_on_a_full_disk_from_the_reserve(tmp_path: Path) -> None:
    record = records.Record(RunFolder(tmp_path))
    (tmp_path / ".reserve").write_bytes(b"0" * 100)
    record.finish("FAILED", error="x")
    assert not (tmp_path / ".reserve").exists()
    assert (fields(tmp_path)["status"], fields(tmp_path)["error"]) == ("FAILED", "x")


def test_the_end_is_stored_though_the_object_store_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(records, "LAST_PAUSES_S", (0.01, 0.01, 0.01))
    store = tmp_path / "store"
    (store / "digits" / "run_001" / "logs").mkdir(parents=True)
    run = run_folder(store.as_uri(), "digits", "run_001")
    run.path.mkdir(parents=True)
    record = records.Record(run, status="RUNNING")
    log = LogFile(run, "logs/driver.log")
    log.write("accuracy 0.99\n")
    moved = store.rename(tmp_path / "unreachable")
    store.write_text("no folder")
    log.push()
    with monkeypatch.context() as patch:
        patch.setattr(records.time, "sleep", lambda _: (store.unlink(), moved.rename(store)))
        record.finish("SUCCEEDED")
    log.close()
    assert fields(store / "digits" / "run_001")["status"] == "SUCCEEDED"
    assert (store / "digits" / "run_001" / "logs" / "driver.log").read_text() == "accuracy 0.99\n"


class TestOneDriver:
    """A run has one driver at a time."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunFolder:
        folder = claim_run(str(tmp_path), "digits")
        folder.claim_attempt(1)
        return folder

    @pytest.mark.process
    def test_one_that_died_on_this_machine_is_followed_at_once(self, run: RunFolder) -> None:
        with subprocess.Popen(["sleep", "9"]) as process:
            started = leases.start_time_of(process.pid)
            process.kill()
        records.Record(run, status="RUNNING", **leases.this_process() | {"pid": process.pid, "pid_started": started})
        assert records.status_of(records.load_record(run)) == "STALE"
        assert drivers.take_over(run) == 2

    @pytest.mark.parametrize(("age", "status"), [(5, "RUNNING"), (61, "STALE")])
    def test_of_another_machine_the_heartbeat_counts(self, run: RunFolder, age: int, status: str) -> None:
        records.Record(run, status="RUNNING", **leases.this_process() | {"boot": "elsewhere"})
        then = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=age)
        run.record.write_text(json.dumps(records.load_record(run) | {"heartbeat": then.isoformat()}))
        assert records.status_of(records.load_record(run)) == status

    def test_of_two_that_follow_one_wins(self, run: RunFolder) -> None:
        records.Record(run, status="STOPPED")

        def follow(_: int) -> int:
            try:
                return drivers.take_over(run)
            except UsageError:
                return 0

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(follow, range(8)))
        assert [number for number in won if number == 2] == [2]

    def resume(self, run: RunFolder) -> records.Record:
        """Claim a run as its driver does, before its state is restored."""
        before, number = records.load_record(run), drivers.take_over(run)
        return records.Record(
            run, before, replaced=before, status="RUNNING", attempt=number, start=None, **leases.this_process()
        )

    def test_one_that_restores_is_alive_and_puts_the_record_back(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLX_STORAGE", run.root)
        records.Record(run, status="SUCCEEDED", attempt=1, metrics={"a": 0.1, "b": float("nan")})
        before = run.record.read_bytes()
        assert b'"b": null' in before  # JSON has no NaN
        record = self.resume(run)
        record.update(device="cpu")
        with pytest.raises(UsageError, match=r"digits run_001 is being trained by process \d+ on "):
            drivers.take_over(run)
        with pytest.raises(UsageError, match="digits run_001 is RUNNING; stop it first"):
            xp.refuse_living(resolve_run(str(run.path), "latest"))
        record.withdraw()
        assert run.record.read_bytes() == before
        record.update(status="FAILED")
        assert run.record.read_bytes() == before
        assert drivers.take_over(run) == 3

    def test_only_a_request_to_stop_the_earlier_driver_is_withdrawn(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        records.Record(run, status="STOPPED", attempt=1)
        run.ask(run.STOP)
        drivers.take_over(run)
        assert run.STOP not in run.names()
        records.Record(run, status="STOPPED", attempt=2)
        claim = RunFolder.claim_attempt
        monkeypatch.setattr(RunFolder, "claim_attempt", lambda *args: [claim(*args), run.ask(run.STOP)][0])
        drivers.take_over(run)
        assert run.STOP in run.names()

    def test_one_that_dies_while_it_restores_has_changed_nothing(self, run: RunFolder) -> None:
        records.Record(run, status="SUCCEEDED", attempt=1)
        before = records.load_record(run)
        self.resume(run).update(pid=1, pid_started="-1")
        assert records.status_of(records.load_record(run)) == "STALE"
        assert drivers.refuse_living(run) == before
        assert drivers.take_over(run) == 3

    def test_one_that_freezes_between_its_look_and_its_write_changes_nothing(self, run: RunFolder) -> None:
        first = records.Record(run, status="STOPPED", attempt=1)
        look = first.check_ours

        def freeze() -> None:
            look()
            assert drivers.take_over(run) == 2
            records.Record(run, records.load_record(run), status="RUNNING", attempt=2)

        first.check_ours = freeze  # type: ignore[method-assign]
        first.update(status="FAILED")
        assert (records.load_record(run)["status"], records.load_record(run)["attempt"]) == ("RUNNING", 2)
        assert [path.name for path in run.path.glob(".run.json.*")] == []

    def test_where_nobody_can_be_the_only_one_no_run_is_taken_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another file system of Arrow simulates an object store without conditional writes."""
        storage = "mock:///storage"
        monkeypatch.setattr(files, "SCHEMES", ("mock",))
        with pytest.raises(StorageError, match="so two drivers could train digits/run_001 at once. Start a new run"):
            run_folder(storage, "digits", "run_001").claim_attempt(2)

    @pytest.mark.s3
    def test_on_an_object_store_too(self, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = claim_run(s3.format(f"fence-{tmp_path.name}"), "digits")
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda pid: folder.claim_attempt(2, {"pid": pid}), range(8)))
        assert sum(won) == 1
        assert json.loads(folder.read(".attempt-002")) == {"pid": won.index(True)}
        assert folder.attempts() == 2
        monkeypatch.setattr(ObjectStore, "put_new", lambda *_: True)  # like a store that ignores the condition
        with pytest.raises(StorageError, match="ignores the condition If-None-Match"):
            folder.claim_attempt(3)

    def test_one_that_was_followed_writes_no_more(self, run: RunFolder) -> None:
        first = records.Record(run, status="RUNNING", attempt=1)
        second = records.Record(run, records.load_record(run), status="RUNNING", attempt=2 * run.claim_attempt(2))
        first.finish("FAILED")
        assert records.load_record(run)["status"] == "RUNNING"
        second.finish("SUCCEEDED")
        assert records.load_record(run)["status"] == "SUCCEEDED"
