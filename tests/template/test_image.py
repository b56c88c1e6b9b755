"""The image and the conda environment of a generated experiment: linted, pinned in one place, and without secrets."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pathspec import GitIgnoreSpec

from mlx_runtime.storage.redaction import FILES

pytestmark = pytest.mark.process


def test_the_dockerfile_is_linted(baked: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "Dockerfile"], cwd=baked, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_both_install_the_same_packages(baked: Path) -> None:
    """The versions of torch and Ray are in constraints.txt only, and both use the same Python."""
    dockerfile = (baked / "Dockerfile").read_text()
    environment = yaml.safe_load((baked / "environment.yml").read_text())
    assert environment["name"] == "digits"
    python, _, pip = environment["dependencies"]
    version = python.removeprefix("python=")
    assert re.search(rf"^FROM python:{re.escape(version)}\.\d+-slim-\w+$", dockerfile, re.MULTILINE)
    words = " ".join(pip["pip"]).replace('"', "").split()
    (install,) = re.findall(r"uv pip install --system (.*?)\n\n", dockerfile, re.DOTALL)
    assert sorted(install.replace("\\\n", " ").replace('"', "").split()) == sorted(words)
    assert not re.search(r"(torch|ray)\s*[=<>]=", dockerfile + str(environment))
    assert "torch==" in (baked / "constraints.txt").read_text()


def test_the_image_contains_no_secrets_or_runs(baked: Path) -> None:
    ignored = GitIgnoreSpec.from_lines((baked / ".dockerignore").read_text().splitlines())
    for name in (".env", "src/key.pem", "secrets.yaml", "runs/digits/run_001/run.json", ".venv/bin/python"):
        assert ignored.match_file(name), name
    for name in (".env.example", ".wheels/mlx_runtime-0.1.0-py3-none-any.whl", "main.py", "src/conf.yaml"):
        assert not ignored.match_file(name), name
    lines = (baked / ".dockerignore").read_text().splitlines()
    assert [name for name in FILES if f"**/{name}" not in lines and f"!**/{name.removeprefix('!')}" not in lines] == []
