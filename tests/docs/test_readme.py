"""README.md: links work, and the output shown is that of the commands. test_install.py runs the commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import readme

pytestmark = pytest.mark.pure


@pytest.mark.process
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


@pytest.mark.process
def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(phony[1].split())
