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

DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""Libraries whose distribution has another name."""


def distribution(library: str) -> str:
    return DISTRIBUTIONS.get(library, library)


def hide(folder: Path, libraries: Collection[str]) -> dict[str, str]:
    """Return the variables of commands that cannot import some libraries, given an empty folder."""
    distributions = [*map(distribution, libraries)]
    (folder / "sitecustomize.py").write_text(HIDE.format(libraries=tuple(libraries), distributions=distributions))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "runtime")])}
