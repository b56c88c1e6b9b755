"""README.md: its commands run in a fresh clone, and what it shows is what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import readme

COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines()
]

NOT_HERE = {"make test", "make bench", "make launch RAY_ADDRESS=http://head:8265"}
"""What is not run here: the command that runs this test would never end, one takes too long, one needs a cluster."""


def outline(text: str) -> list[str]:
    """What a run prints, with numbers, seconds and paths of the machine left out."""
    text = re.sub(r"(/\S+|~/\S+)", "PATH", text)
    return [re.sub(r"\d[\d,.]*(e-\d+)?", "N", line) for line in text.splitlines() if not line.startswith("epoch")]


@pytest.mark.timeout(1800)
def test_the_commands_work_in_a_fresh_clone_with_an_empty_home(tmp_path: Path) -> None:
    """Clone, then every command of README.md in order, as typed; a new environment, an empty HOME."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    base = Path(sys.base_prefix) / "bin"
    environment = kept | {"HOME": str(home), "PATH": f"{base}:/usr/bin:/bin"}
    git = ["-c", "user.name=a", "-c", "user.email=a@b"]
    origin = tmp_path / "origin"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(origin)], check=True)
    changed = subprocess.run(
        ["git", "ls-files", "-com", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in changed.stdout.splitlines():
        if (ROOT / name).exists():
            (origin / name).parent.mkdir(parents=True, exist_ok=True)
            (origin / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["git", "add", "-A"], cwd=origin, check=True)
    subprocess.run(["git", *git, "commit", "-q", "--allow-empty", "-m", "working tree"], cwd=origin, check=True)

    printed = {}
    folder = tmp_path
    for command in COMMANDS:
        if command in NOT_HERE:
            continue
        typed = command.replace("<this repository>", str(origin))
        inside = command.startswith(("make run", "make prepare"))  # of the experiment that the demo made
        where = folder / "demo" / "digits" if inside else folder
        options = "PYTHON=../../.venv/bin/python" if inside else ""
        done = subprocess.run(
            ["bash", "-c", f"{typed} {options}"],
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed[command] = done.stdout
        if command.startswith("git clone"):
            folder = tmp_path / "mlx"
    shown = outline(readme.section("demo output").replace("…\n", ""))
    assert [line for line in outline(printed["make demo"]) if not line.startswith("installing")] == shown
    assert (tmp_path / "my-experiment" / "main.py").is_file()


def test_the_help_and_the_tree_are_those_of_a_generated_experiment(baked: Path) -> None:
    assert readme.section("experiment help") == readme.experiment_help(baked)
    assert readme.section("experiment tree") == readme.experiment_tree(baked)


def test_every_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_python_in_readme_compiles() -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        compile(block, "README.md", "exec")


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(phony[1].split())
