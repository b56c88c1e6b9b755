"""What is sent to a cluster."""

from pathlib import Path

import pytest

from mlx_runtime.uploads import Upload

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
    with upload.staged() as staged:
        assert (staged / "src" / "a.py").read_text() == "src/a.py"
        assert (staged / "mlx_runtime" / "uploads.py").is_file()
        assert not list(staged.rglob("*.pyc"))
