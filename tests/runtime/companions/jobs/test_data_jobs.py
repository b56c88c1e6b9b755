"""Jobs that fill a folder of the storage completely or not at all, on real folders and a real S3 server.

<storage>/
    data/digits/          a.bin 3,000 bytes, b.bin 1,000, deep/er/c.bin 500, deep/er/d.bin 500
    data/made/            output of a job: its files, job.json
"""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Mlx, Start, edit
from faults import wait_for
from storages import files, put

from mlx_runtime.companions.jobs import filling
from mlx_runtime.companions.jobs.contents import path_in, survey
from mlx_runtime.companions.jobs.filling import Filling, job_record
from mlx_runtime.errors import StorageError, UsageError
from mlx_runtime.storage import documents, leases
from mlx_runtime.storage.files import join_path, storage_at, to_json

pytestmark = pytest.mark.process

# -- a folder that is being filled --


def test_nothing_is_there_until_all_is(root: str) -> None:
    """The folder appears at the end; on S3, its job.json reports the end."""
    place = join_path(root, "data", "made")
    with Filling(place, overwrite=False, name="made") as target:
        target.output.write("x", "deep", "a.txt")
        whole = job_record(storage_at(place))
        assert whole is None or filling.job_status(whole) == "RUNNING"
        if storage_at(root).local:
            assert "made" not in storage_at(root).names("data")
        assert target.commit() == (1, 1)
    record = job_record(storage_at(place))
    assert record is not None
    assert (record["status"], record["files"], record["size_bytes"]) == ("SUCCEEDED", 1, 1)
    assert storage_at(place).read("deep", "a.txt") == b"x"
    assert [name for name in storage_at(root).names("data") if name.startswith(".")] == []


def test_a_failure_leaves_nothing_that_looks_whole(root: str) -> None:
    place = join_path(root, "data", "made")

    def fail() -> None:
        with Filling(place, overwrite=False) as target:
            target.output.write("x", "a.txt")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    if storage_at(root).local:
        assert storage_at(root).names("data") == ["digits"]
    else:
        record = job_record(storage_at(place))
        assert record is not None
        assert record["status"] == "FAILED"
        shown = survey(path_in(root, "data"), 1).lines()
        assert any("(incomplete: its job is FAILED)" in line for line in shown)
    with Filling(place, overwrite=False) as target:  # and the next one starts from scratch
        target.output.write("y", "b.txt")
        target.commit()
    assert storage_at(place).names() == ["b.txt", "job.json"]


def test_what_is_there_is_kept_unless_it_may_be_replaced(root: str) -> None:
    place = join_path(root, "data", "made")
    for number, overwrite in ((1, False), (2, True)):
        with Filling(place, overwrite=overwrite) as target:
            target.output.write("x", f"{number}.txt")
            target.commit()
    assert storage_at(place).names() == ["2.txt", "job.json"]
    with pytest.raises(UsageError, match=r"made.* already exists, made 20\d\d-.*cfg.overwrite=true"):
        Filling(place, overwrite=False)
    with pytest.raises(UsageError, match="already exists, and no data job made it"):
        Filling(join_path(root, "data", "digits"), overwrite=True)


def test_two_jobs_do_not_fill_the_same_folder(root: str) -> None:
    place = join_path(root, "data", "made")
    with Filling(place, overwrite=False) as target:
        with pytest.raises(UsageError, match=r"is being filled by process \d+ on .*; wait for it"):
            Filling(place, overwrite=True)
        target.output.write("x", "a.txt")
        target.commit()
    assert storage_at(place).names() == ["a.txt", "job.json"]


def test_two_that_began_at_the_same_instant_do_not_mix(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs that do not see each other: one wins, the other fails with an error."""
    place = join_path(root, "data", "made")
    monkeypatch.setattr(filling, "refuse_present", lambda location, overwrite: None)
    monkeypatch.setattr(filling, "recover", lambda *_: None)
    first, second = Filling(place, overwrite=False), Filling(place, overwrite=False)
    told = []
    for number, target in enumerate((first, second)):
        try:
            with target:
                target.output.write("x", f"{number}.txt")
                target.commit()
        except UsageError as error:
            told.append(str(error))
    assert len(told) == 1
    assert "another job has filled" in told[0]
    record = job_record(storage_at(place))
    assert record is not None
    assert record["status"] == "SUCCEEDED"


def test_what_a_killed_job_left_goes_with_the_next(folder: Path) -> None:
    place = str(folder / "data" / "made")
    dead = {"status": "RUNNING", "heartbeat": documents.now()} | leases.this_process() | {"pid": 1, "pid_started": "0"}
    put(str(folder), {"data/.made.part-0123/job.json": to_json(dead).encode(), "data/.made.part-0123/x": b"x"})
    put(str(folder), {"data/.mad.part-0123/job.json": to_json(dead).encode()})  # of another job
    (folder / "data" / ".made.part-4567").mkdir()  # another job begins at this moment
    (folder / "data" / ".made.part-89ab").mkdir()
    os.utime(folder / "data" / ".made.part-89ab", (0, 0))
    with Filling(place, overwrite=False) as target:
        target.output.write("x", "a.txt")
        target.commit()
    assert sorted(path.name for path in (folder / "data").iterdir()) == [
        ".mad.part-0123",
        ".made.part-4567",
        "digits",
        "made",
    ]


def test_what_was_moved_aside_comes_back(folder: Path) -> None:
    """A job with overwrite=true was killed between two renames."""
    put(str(folder), {"data/.made.old-0123/job.json": b'{"status": "SUCCEEDED", "heartbeat": "x"}'})
    put(str(folder), {"data/.made.old-0123/precious": b"x"})
    with pytest.raises(UsageError, match="already exists"):
        Filling(str(folder / "data" / "made"), overwrite=False)
    assert (folder / "data" / "made" / "precious").is_file()


def test_a_job_that_ends_while_it_replaces_gives_back_what_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(folder / "data" / "made")
    with Filling(place, overwrite=False) as target:
        target.output.write("x", "1.txt")
        target.commit()
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if ".part-" in path.name:
            raise OSError("no more")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no more"), Filling(place, overwrite=True) as target:
        target.commit()
    assert storage_at(place).names() == ["1.txt", "job.json"]


def test_a_node_without_the_storage_does_not_write_beside_it(folder: Path) -> None:
    with Filling(str(folder / "data" / "made"), overwrite=False) as target:
        lost = filling.Output(str(folder / "not" / "mounted"))
        with pytest.raises(StorageError, match=r"does not see .*; the storage must be a folder that all nodes share"):
            lost.write(b"x", "a")
        assert not (folder / "not").exists()
        assert target.output.folder.is_dir()


# -- a job, run by its owner --

JOB = """
import os
import time
from dataclasses import dataclass

import mlx_runtime


@dataclass
class JobConfig(mlx_runtime.DataConfig):
    name: str = "lines"
    start_workers: int = 0
    storage_path: str = "storage"


@dataclass
class Text:
    lines: int = 4
    sleep_s: float = 0.0
    fail_at: int | None = None
    die_at: int | None = None


class Job(mlx_runtime.DataJob):
    cfg: JobConfig
    text: Text

    def run(self):
        total = sum(self.map(self.write_line, range(self.text.lines), title="lines", key=str))
        self.output.write(f"{total}\\n", "total.txt")

    def write_line(self, number):
        time.sleep(self.text.sleep_s)
        if number == self.text.fail_at:
            raise ValueError(f"line {number} is blank")
        once = self.output.folder / ".died"
        if number == self.text.die_at and not once.exists():
            once.touch()
            os._exit(1)
        self.output.write(f"line {number} by {os.getpid()}\\n", "lines", f"{number}.txt")
        return number
"""


@pytest.fixture(scope="module")
def bound_job(baked_job: Path, mlx: Mlx, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data job with its conf.yaml."""
    project = tmp_path_factory.mktemp("bound_job") / "lines"
    (project / "src").mkdir(parents=True)
    (project / "src" / "__init__.py").touch()
    (project / "src" / "job.py").write_text(JOB)
    (project / "main.py").write_text((baked_job / "main.py").read_text())
    done = mlx(project, "data", "bind")
    assert done.returncode == 0, done.stderr
    return project


@pytest.fixture
def job(bound_job: Path, tmp_path: Path) -> SimpleNamespace:
    """A data job for a single test, with its output."""
    project = Path(shutil.copytree(bound_job, tmp_path / "lines"))
    return SimpleNamespace(
        project=project, data=project / "storage" / "data", made=project / "storage" / "data" / "lines"
    )


def test_it_runs_inside_this_process(job: SimpleNamespace, mlx: Mlx) -> None:
    (job.project / "src" / "conf.yaml").unlink()
    done = mlx(job.project, "data", "run", "text.lines=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:5] == [
        "no src/conf.yaml yet: binding first",
        "wrote src/conf.yaml",
        "job       lines run_001",
        f"folder    {job.made}",
        "workers   0: in this process",
    ]
    assert done.stdout.splitlines()[-1] == f"folder    {job.made}"
    assert re.search(r"^took      \d+\.\d s\nwrote     4 files, \d\d bytes$", done.stdout, re.MULTILINE)
    assert (job.made / "total.txt").read_text() == "3\n"
    record = json.loads((job.made / "job.json").read_text())
    assert record["overrides"] == ["text.lines=3"]
    assert record["config"]["text"]["lines"] == 3
    assert record["name"] == "lines"


@pytest.mark.cluster
def test_it_runs_in_parallel_on_ray_and_survives_a_dead_process(job: SimpleNamespace, mlx: Mlx) -> None:
    done = mlx(job.project, "data", "run", "cfg.start_workers=2", "text.lines=6", "text.die_at=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "workers   2 tasks at a time in embedded Ray on" in done.stdout
    writers = {(job.made / "lines" / f"{number}.txt").read_text().split()[-1] for number in range(6)}
    assert len(writers) >= 2
    assert (job.made / "total.txt").read_text() == "15\n"
    done = mlx(job.project, "data", "run", "cfg.start_workers=2", "cfg.path=data/failed", "text.fail_at=2")
    assert done.returncode == 1
    assert "error: ValueError: line 2 is blank (in item 2)\n  src/job.py:" in done.stderr
    assert "mlx_runtime" not in done.stderr


@pytest.mark.parametrize(
    ("statement", "error"),
    [('ValueError(f"line {number} is blank")', "ValueError: line 2 is blank"), ("SystemExit(0)", "SystemExit: 0")],
)
def test_an_error_of_the_users_is_told_with_item_and_line(
    job: SimpleNamespace, mlx: Mlx, statement: str, error: str
) -> None:
    """Also one that exits has not succeeded."""
    text = '            raise ValueError(f"line {number} is blank")'
    edit(job.project / "src" / "job.py", text, f"            raise {statement}")
    done = mlx(job.project, "data", "run", "text.fail_at=2")
    assert done.returncode == 1
    assert f"error: {error} (in item 2)" in done.stderr.splitlines()
    assert f"  src/job.py:{1 + JOB.splitlines().index(text)} in write_line" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(job.data.iterdir()) == []


def test_an_interrupted_job_resumes_with_its_finished_items(job: SimpleNamespace, mlx: Mlx) -> None:
    code = job.project / "src" / "job.py"
    edit(code, "if number == self.text.fail_at:", "if number == 2 and os.path.exists('fail'):")
    edit(code, 'once = self.output.folder / ".died"', "once = None")
    (job.project / "fail").touch()
    done = mlx(job.project, "data", "run", "text.lines=4")
    assert done.returncode == 1
    assert "kept      2 finished items; to continue: mlx data run --resume text.lines=4\n" in done.stdout
    (part,) = job.data.iterdir()
    first = (part / "lines" / "0.txt").read_text()
    (part / "lines" / "2.txt").write_text("unfinished")
    (part / "lines" / "x.txt").write_text("unfinished")
    assert mlx(job.project, "data", "ls").stdout.splitlines()[1].split()[:4] == [
        "lines",
        "run_001",
        "FAILED",
        "data/lines",
    ]

    done = mlx(job.project, "data", "run", "--resume", "text.lines=5")
    refused = "error: lines/run_001 cannot be resumed: the settings changed since it was interrupted."
    assert (done.returncode, done.stderr.partition(" Undo")[0]) == (2, refused)
    text = code.read_text()
    code.write_text(f"{text}# changed\n")
    done = mlx(job.project, "data", "run", "--resume")
    assert (done.returncode, "the code changed" in done.stderr) == (2, True)
    code.write_text(text)
    assert (part / "lines" / "x.txt").exists()  # nothing has been touched

    (job.project / "fail").unlink()
    done = mlx(job.project, "data", "run", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed   2 finished items" in done.stdout.splitlines()
    assert [path.name for path in job.data.iterdir()] == ["lines"]
    assert files(str(job.made)) == ["job.json", *(f"lines/{number}.txt" for number in range(4)), "total.txt"]
    assert ((job.made / "lines" / "0.txt").read_text(), (job.made / "total.txt").read_text()) == (first, "6\n")
    (row,) = json.loads(mlx(job.project, "data", "ls", "--json").stdout)
    assert (row["status"], row["files"], [item["status"] for item in row["attempts"]]) == ("SUCCEEDED", 5, ["FAILED"])
    assert mlx(job.project, "data", "rm", "-y", "data/lines").returncode == 0
    assert "error: ValueError: line 2 is blank" in mlx(job.project, "data", "logs", "lines", "--tail", "40").stdout


def test_a_job_is_stopped_by_its_name(job: SimpleNamespace, mlx: Mlx, start: Start) -> None:
    running = start(job.project, "data", "run", "text.sleep_s=0.3", "text.lines=1000")
    wait_for(lambda: list(job.data.glob(".lines.part-*/lines/2.txt")))
    done = mlx(job.project, "data", "stop", "lines")
    assert (done.returncode, done.stdout) == (0, "lines run_001 is STOPPED\n"), done.stderr
    _, told = running.communicate(timeout=100)
    assert (running.returncode, told) == (143, f"stopped; {job.made} was not created\n")
    assert list(job.data.iterdir()) == []
    done = mlx(job.project, "data", "stop", "lines")
    assert (done.returncode, done.stderr) == (2, "error: lines run_001 is STOPPED; there is nothing to stop\n")
    assert mlx(job.project, "data", "logs", "lines", "-f").returncode == 143


def test_a_killed_job_leaves_nothing_that_looks_whole(job: SimpleNamespace, mlx: Mlx, start: Start) -> None:
    running = start(job.project, "data", "run", "text.sleep_s=0.3", "text.lines=100")
    wait_for(lambda: list(job.data.glob(".lines.part-*/lines/2.txt")))
    assert not job.made.exists()
    running.kill()
    running.wait()
    assert not job.made.exists()
    assert "(incomplete: its job is STALE)" in mlx(job.project, "data", "show").stdout
    assert mlx(job.project, "data", "run").returncode == 0
    assert [path.name for path in job.data.iterdir()] == ["lines"]


@pytest.mark.parametrize("path", ["/tmp/out", "a/../../b"])
def test_a_folder_outside_the_storage_is_refused(job: SimpleNamespace, mlx: Mlx, path: str) -> None:
    done = mlx(job.project, "data", "run", f"cfg.path='{path}'")
    assert done.returncode == 1
    assert "it must be a folder below the storage, like data/lines" in done.stderr


@pytest.mark.s3
def test_it_fills_an_object_store(job: SimpleNamespace, mlx: Mlx, s3: str, tmp_path: Path) -> None:
    (job.project / "src" / "job.py").write_text(JOB.replace('once = self.output.folder / ".died"', "once = None"))
    root = s3.format(tmp_path.name)
    done = mlx(job.project, "data", "run", MLX_STORAGE=root)
    assert done.returncode == 0, done.stderr
    assert files(join_path(root, "data", "lines")) == [
        "job.json",
        *(f"lines/{number}.txt" for number in range(4)),
        "total.txt",
    ]
    assert storage_at(root).read("data", "lines", "total.txt") == b"6\n"
    shown = mlx(job.project, "data", "show", "--depth", "1", "data", MLX_STORAGE=root).stdout
    assert re.fullmatch(r"└── lines +[\d.]+ kB  6 files", shown.splitlines()[1])
