"""The files that are uploaded to a cluster."""

import os
import subprocess
from pathlib import Path

import pytest

from mlx_runtime.errors import UsageError
from mlx_runtime.runs.uploads import Upload

pytestmark = pytest.mark.pure


def test_ignore_files_are_followed(tmp_path: Path) -> None:
    """
    kept: main.py  src/a.py  src/data/keep.csv  notes/b.txt
    not:  .git .venv runs .env *.log src/data/*.csv notes/private
    """
    for name in (
        *("main.py", "src/a.py", "src/__pycache__/a.pyc", "src/data/keep.csv", "src/data/x.csv", "x.log"),
        *(".git/HEAD", ".venv/bin/python", "runs/digits/run_001/run.json", ".env", "notes/b.txt", "notes/private"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("*.log\nsrc/data/*.csv\n!src/data/keep.csv\n")
    (tmp_path / "notes" / ".rayignore").write_text("/private\n")
    upload = Upload.of(tmp_path)
    found = {str(path) for path, _ in upload.files}
    ignores = {".gitignore", "notes/.rayignore"}
    assert found - ignores == {"main.py", "src/a.py", "src/data/keep.csv", "notes/b.txt"}
    with upload.stage() as staged:
        assert (staged / "src" / "a.py").read_text() == "src/a.py"
        assert (staged / "mlx_runtime" / "cli" / "train.py").is_file()
        assert not list(staged.rglob("*.pyc"))


def test_a_file_that_was_removed_since_is_left_out(tmp_path: Path) -> None:
    """As editors do with the files that they write next to the one that is open."""
    for name in ("main.py", ".main.py.swp"):
        (tmp_path / name).write_text(name)
    upload = Upload.of(tmp_path)
    (tmp_path / ".main.py.swp").unlink()
    with upload.stage() as staged:
        assert [path.name for path in staged.glob("*main*")] == ["main.py"]


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def uploaded(folder: Path) -> set[str]:
    """Return the files that a cluster would receive, from a real copy."""
    with Upload.of(folder).stage() as staged:
        files = [path for path in staged.rglob("*") if path.is_file()]
        return {str(path.relative_to(staged)) for path in files if path.relative_to(staged).parts[0] != "mlx_runtime"}


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


def test_a_project_that_git_ignores_is_uploaded(tmp_path: Path) -> None:
    put(tmp_path / "demo" / "digits", "main.py", "x.log")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("demo/\n")
    (tmp_path / "demo/digits/.gitignore").write_text("*.log\n")
    assert uploaded(tmp_path / "demo/digits") == {".gitignore", "main.py"}


def test_a_worktree_has_the_excludes_of_its_repository(tmp_path: Path) -> None:
    repository, tree = tmp_path / "repository", tmp_path / "tree"
    git = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    subprocess.run([*git, "worktree", "add", "-q", str(tree)], check=True)
    (repository / ".git/info/exclude").write_text("private.txt\n")
    put(tree, "main.py", "private.txt")
    assert uploaded(tree) == {"main.py"}


SECRETS = (
    *(".env", ".env.local", "sub/.ENV.prod", "key.pem", "deep/er/server.KEY", "id_rsa", "sub/id_ed25519.pub", ".netrc"),
    *(".aws/credentials", ".ssh/config", "sub/.kube/config", "gcp-credentials.json", "service-account.json", "a.kdbx"),
)


def test_secrets_are_left_out_and_named(tmp_path: Path) -> None:
    put(tmp_path, "main.py", "src/keys.py", "src/tokenizer.json", ".env.example", "environment.yaml", *SECRETS)
    upload = Upload.of(tmp_path)
    assert uploaded(tmp_path) == {"main.py", "src/keys.py", "src/tokenizer.json", ".env.example", "environment.yaml"}
    named = {str(path) for path in upload.left_out["may hold secrets"]}
    folders = {".aws/credentials": ".aws", ".ssh/config": ".ssh", "sub/.kube/config": "sub/.kube"}
    assert named == {folders.get(name, name) for name in SECRETS}
    [note] = upload.notes
    assert note.startswith("not uploaded, may hold secrets: .aws, .env, .env.local, .netrc, .ssh, ")
    assert note.endswith(" and 4 more")


def test_what_is_ignored_is_not_named(tmp_path: Path) -> None:
    put(tmp_path, "main.py", ".env", "key.pem")
    (tmp_path / ".gitignore").write_text(".env\n*.pem\n")
    assert Upload.of(tmp_path).notes == []


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
    assert uploaded(project) == {"main.py", "src/a.py", "inside.py"}
    assert {why: {str(path) for path in paths} for why, paths in Upload.of(project).left_out.items()} == {
        "a link out of the project": {"file", "data", "up"},
        "a link to a folder": {"src/again"},
        "may hold secrets": {".env", ".aws", "settings", "settings2"},
    }


def test_a_project_may_be_reached_by_a_link(tmp_path: Path) -> None:
    put(tmp_path / "project", "main.py", "src/a.py")
    (tmp_path / "link").symlink_to("project")
    assert uploaded(tmp_path / "link") == {"main.py", "src/a.py"}


def test_an_ignore_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".gitignore")
    with pytest.raises(UsageError, match=".gitignore is not a regular file"):
        Upload.of(tmp_path)
