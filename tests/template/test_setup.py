"""`make setup` if the runtime is not installed: with uv, with pip if uv fails, and a one-line error if both fail.

It installs two empty wheels, from folders that are named only in pip's settings:

links/
    mlx_runtime-0.1.0-py3-none-any.whl
    more/
        requirement-0.1.0-py3-none-any.whl
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from test_template import make

pytestmark = pytest.mark.install

BARE = Path(sys.base_prefix) / "bin" / "python3"
INSTALLING = "installing into .venv (once; a minute or two)\n"
WITH_PIP = "uv failed (see .venv/uv.log); installing with pip, which takes several minutes\n"


def write_wheel(folder: Path, name: str, version: str = "0.1.0", code: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    extras = "".join(f"Provides-Extra: {extra}\n" for extra in ("serving", "sweeps", "train", "ui", "views"))
    files = {
        f"{name}/__init__.py": "",
        f"{name}/__main__.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extras}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


@pytest.fixture
def links(tmp_path: Path) -> str:
    """The value of PIP_FIND_LINKS."""
    more = tmp_path / "links" / "more"
    more.mkdir(parents=True)
    write_wheel(more.parent, "mlx_runtime")
    write_wheel(more, "requirement")
    return f"{more.parent} {more}"


@pytest.fixture
def folder(baked: Path, tmp_path: Path) -> Path:
    """A generated experiment with one requirement."""
    made = Path(shutil.copytree(baked, tmp_path / "made"))
    (made / "requirements.txt").write_text("requirement\n")
    return made


def downloads() -> dict[str, str]:
    """The variables with which pip and uv reach the index, and find what this user has downloaded before."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "UV_CACHE_DIR"}
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return {f"{tool.upper()}_CACHE_DIR": str(cache / tool) for tool in ("pip", "uv")} | kept


def setup(folder: Path, python: Path = BARE, **settings: str) -> "subprocess.CompletedProcess[str]":
    environment = downloads() | {"HOME": str(folder.parent), "PATH": f"{BARE.parent}:/usr/bin:/bin"} | settings
    return make(folder, environment, "setup", f"PYTHON={python}", "RUNTIME=mlx-runtime==0.1.0")


def site_packages(folder: Path) -> Path:
    return next((folder / ".venv" / "lib").glob("python*")) / "site-packages"


def installers(folder: Path) -> set[str]:
    site = site_packages(folder)
    return {
        (site / f"{name}-0.1.0.dist-info" / "INSTALLER").read_text().strip() for name in ("mlx_runtime", "requirement")
    }


def test_uv_installs_from_the_sources_of_pip(folder: Path, links: str) -> None:
    """It compiles bytecode where runs would not write it."""
    done = setup(folder, PIP_FIND_LINKS=links, PYTHONDONTWRITEBYTECODE="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, INSTALLING, "")
    assert installers(folder) == {"uv"}
    assert [*site_packages(folder).glob("requirement/__pycache__/*")] != []


def test_pip_installs_where_uv_fails(folder: Path, links: str) -> None:
    write_wheel(Path(links.split()[0]), "uv", code="raise SystemExit('illegal instruction')")
    done = setup(folder, PIP_FIND_LINKS=links, PIP_NO_INDEX="1")
    told = f"{INSTALLING}{WITH_PIP}"
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")
    assert installers(folder) == {"pip"}
    assert "illegal instruction" in (folder / ".venv" / "uv.log").read_text()


def test_without_a_network_it_prints_one_line(folder: Path) -> None:
    done = setup(folder, PIP_INDEX_URL="https://127.0.0.1:9/simple", PIP_FIND_LINKS=str(folder), PIP_RETRIES="1")
    error, of_make = done.stderr.splitlines()
    assert error == "error: cannot reach the package index; check the network and pip's settings, then run make again"
    assert of_make.startswith("make: ***")
    assert not (folder / ".venv" / ".complete").exists()


def test_a_python_that_is_too_old_is_refused(folder: Path) -> None:
    old = folder / "python3.9"
    says = 'import sys; sys.version_info, sys.version = (3, 9, 18), "3.9.18 (main)"; exec(sys.argv[2])'
    old.write_text(f"#!/bin/sh\nexec {BARE} -c '{says}' \"$@\"\n")
    old.chmod(0o755)
    done = setup(folder, python=old)
    assert (done.stdout, done.stderr.splitlines()[0]) == ("", "error: Python 3.10 or newer is needed, this is 3.9.18")
    assert not (folder / ".venv").exists()


@pytest.mark.pure
def test_the_three_makefiles_install_in_the_same_way() -> None:
    makefiles = ["Makefile", "<<cookiecutter.experiment_name>>/Makefile", "data_job/<<cookiecutter.job_name>>/Makefile"]
    blocks = {(ROOT / file).read_text().partition("# Install $(1)")[2] for file in makefiles}
    assert len({block.replace("$(BIN)", ".venv/bin").replace("$(VENV)", ".venv") for block in blocks}) == 1
