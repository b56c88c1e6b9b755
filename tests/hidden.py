"""Hides installed libraries from real commands, by a finder that Python installs at startup:

hidden/
    sitecustomize.py
"""

import os
from collections.abc import Collection
from pathlib import Path

from conftest import ROOT

HIDE = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import DistributionFinder


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {libraries!r} else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context=DistributionFinder.Context()):
        return (found for found in super().find_distributions(context) if found.name not in {distributions!r})


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""

DISTRIBUTIONS = {"mlflow": "mlflow-skinny", "sklearn": "scikit-learn"}
"""Libraries whose distribution has another name."""


def distribution(library: str) -> str:
    return DISTRIBUTIONS.get(library, library)


def hiding(libraries: Collection[str]) -> str:
    """Return code at the start of a script that hides libraries which its process may have imported already."""
    code = HIDE.format(libraries=tuple(libraries), distributions=[*map(distribution, libraries)])
    loaded = f"[name for name in sys.modules if name.partition('.')[0] in {tuple(libraries)!r}]"
    return f"{code}\nfor name in {loaded}: del sys.modules[name]\n"


def hide(folder: Path, libraries: Collection[str]) -> dict[str, str]:
    """Return the variables of commands that cannot import some libraries, given an empty folder."""
    (folder / "sitecustomize.py").write_text(hiding(libraries))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "runtime")])}
