"""The files of an experiment that are uploaded to a cluster, and stored with a run."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from mlx_runtime import MlxError
from mlx_runtime.runs import snapshots, sources
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.snapshots import Upload

pytestmark = pytest.mark.pure


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "storage" / "small" / "run_001")
    folder.path.mkdir(parents=True)
    return folder


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x", *words], check=True)


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def uploaded(folder: Path) -> set[str]:
    """Return the files that a cluster would receive, from a real copy."""
    with Upload.of(folder).stage() as staged:
        files = [path for path in staged.rglob("*") if path.is_file()]
        return {str(path.relative_to(staged)) for path in files if path.relative_to(staged).parts[0] != "mlx_runtime"}


def test_what_git_tracks_or_would_add_is_uploaded(tmp_path: Path) -> None:
    """
    kept: main.py  src/a.py  src/data/keep.csv  notes/b.txt  tracked.log  sub/module.py
    not:  .git .venv runs .env *.log src/data/*.csv notes/private
    """
    put(tmp_path, "main.py", "src/a.py", "src/__pycache__/a.pyc", "src/data/keep.csv", "src/data/x.csv", "x.log")
    put(tmp_path, ".venv/bin/python", "runs/digits/run_001/run.json", ".env", "notes/b.txt", "notes/private")
    put(tmp_path, "tracked.log", "sub/module.py")
    (tmp_path / ".gitignore").write_text("*.log\nsrc/data/*.csv\n!src/data/keep.csv\n")
    (tmp_path / ".rayignore").write_text("/notes/private\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-f", "tracked.log")
    code = {"main.py", "src/a.py", "src/data/keep.csv", "notes/b.txt", "tracked.log", "sub/module.py"}
    assert uploaded(tmp_path) == code | {".gitignore", ".rayignore"}
    with Upload.of(tmp_path).stage() as staged:
        assert (staged / "src" / "a.py").read_text() == "src/a.py"
        assert (staged / "mlx_runtime" / "cli" / "train.py").is_file()
        assert not list(staged.rglob("*.pyc"))


def test_without_git_src_and_the_files_beside_it_are_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "main.py", "requirements.txt", "src/a.py", "src/deep/b.py", "data/big.bin", ".env", "src/token.txt")
    assert uploaded(tmp_path) == {"main.py", "requirements.txt", "src/a.py", "src/deep/b.py"}
    put(tmp_path / "library", "__init__.py", "deep/c.py")
    assert uploaded(tmp_path / "library") == {"__init__.py", "deep/c.py"}
    put(tmp_path, "src/big.ckpt")
    (tmp_path / ".gitignore").write_text("*.ckpt\n")
    beside = {"main.py", "requirements.txt", ".gitignore"}
    assert uploaded(tmp_path) == {*beside, "src/a.py", "src/deep/b.py"}
    monkeypatch.setenv("MLX_JOB", "digits-run_001")  # whose files are those of an upload
    assert uploaded(tmp_path) >= {*beside, "library/deep/c.py"}


@pytest.mark.parametrize("inside", ["", "projects/digits"])
def test_what_git_ignores_elsewhere_is_ignored(tmp_path: Path, inside: str) -> None:
    """Exclude by `.git/info/exclude`, and by a `.gitignore` above a project inside a repository."""
    project = tmp_path / inside
    put(project, "main.py", "private.txt", "notes/private.txt", "big.bin", "top.log", "kept.log")
    put(tmp_path, "README.md")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".git/info/exclude").write_text(f"private.txt\n/{inside}/big.bin\n".replace("//", "/"))
    (tmp_path / ".gitignore").write_text("*.log\n!kept.log\n")
    expected = {"main.py", "kept.log"} | (set() if inside else {".gitignore", "README.md"})
    assert uploaded(project) == expected
    assert Upload.of(project).notes == []


SECRETS = (
    *(".env", ".env.local", "sub/.ENV.prod", "key.pem", "deep/er/server.KEY", "id_rsa", "sub/id_ed25519.pub", ".netrc"),
    *(".aws/credentials", ".ssh/config", "sub/.kube/config", "gcp-credentials.json", "service-account.json", "a.kdbx"),
)


def test_secrets_are_left_out_and_named(tmp_path: Path) -> None:
    put(tmp_path, "main.py", "src/keys.py", "src/tokenizer.json", ".env.example", "environment.yaml", *SECRETS)
    git(tmp_path, "init", "-q")
    upload = Upload.of(tmp_path)
    assert uploaded(tmp_path) == {"main.py", "src/keys.py", "src/tokenizer.json", ".env.example", "environment.yaml"}
    named = {str(path) for path in upload.left_out}
    assert named == {*SECRETS}
    [note] = upload.notes
    assert note.startswith(
        "not uploaded, links, other repositories, or what may hold secrets: .aws/credentials, .env, .env.local"
    )
    assert note.endswith(" and 4 more")


def test_links_are_not_followed_out_of_the_project(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    put(outside, "secret.txt", "folder/secret.txt")
    put(project, "main.py", "src/a.py", ".env", ".aws/credentials")
    (project / "inside.py").symlink_to("src/a.py")
    (project / "file").symlink_to(outside / "secret.txt")
    (project / "data").symlink_to(outside / "folder")
    (project / "up").symlink_to("..")
    (project / "src" / "again").symlink_to("../src")
    (project / "settings").symlink_to(".env")
    (project / "settings2").symlink_to(".aws/credentials")
    (project / "nowhere").symlink_to("nothing")
    git(project, "init", "-q")
    assert uploaded(project) == {"main.py", "src/a.py", "inside.py"}
    links, secrets = {"file", "data", "up", "src/again"}, {".env", ".aws/credentials", "settings", "settings2"}
    assert {*map(str, Upload.of(project).left_out)} == links | secrets


SOURCE = {"src/__init__.py", "src/experiment.py", "src/sizes.py"}


def stored(run: RunFolder) -> set[str]:
    return set(zipfile.ZipFile(run.path / "code.zip").namelist())


def test_a_snapshot_holds_code_and_no_data(tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    put(here, *SOURCE, "main.py", "ignored/x.py", "mlx_runtime/a.py")
    (here / ".gitignore").write_text("ignored/\n")
    (here / "weights.bin").write_bytes(b"#" * (2 << 20))
    git(here, "init", "-q")
    snapshots.store(here, run)
    assert stored(run) == SOURCE | {"main.py", ".gitignore"}
    monkeypatch.setattr(snapshots, "ALL_BYTES", sum(len(name) for name in SOURCE))
    snapshots.store(here, run)
    assert stored(run) == SOURCE
    assert sorted(file.name for file in run.path.iterdir()) == ["code.zip"]


def test_files_of_src_that_differ_from_the_stored_ones_are_named(tmp_path: Path, run: RunFolder) -> None:
    here = tmp_path / "here"
    put(here, *SOURCE, "notes.txt")
    snapshots.store(here, run)
    assert snapshots.unpack(run) == snapshots.unpack(run)
    assert sources.changed_files(here, run) == []
    put(here, "src/more.py")
    (here / "src/sizes.py").write_text("WIDTH = 4")
    (here / "src/experiment.py").unlink()
    (here / "notes.txt").unlink()
    assert sources.changed_files(here, run) == ["src/experiment.py", "src/more.py", "src/sizes.py"]


@pytest.mark.parametrize(("content", "message"), [(None, "has no stored code"), (b"no zip", "code.zip is damaged")])
def test_no_or_damaged_code_is_one_line(content: bytes | None, message: str, run: RunFolder) -> None:
    if content is not None:
        (run.path / "code.zip").write_bytes(content)
    with pytest.raises(MlxError, match=message):
        snapshots.unpack(run)
