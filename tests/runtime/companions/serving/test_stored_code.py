"""The stored code of a run, imported next to the code of other experiments."""

import sys
from pathlib import Path

import pytest

from mlx_runtime.companions.serving.stored_code import private
from mlx_runtime.config.building import build

pytestmark = pytest.mark.pure

MODELS = """
import src.sizes
from src import sizes as same
from src.layers import Linear
from . import layers

class Net:
    def __init__(self, width: int = src.sizes.WIDTH):
        self.layer, self.width = Linear(), width
        assert same is src.sizes and layers.Linear is Linear

    def late(self) -> int:
        from src.sizes import WIDTH
        import json
        return json.loads(str(WIDTH))
"""


def project(folder: Path, width: int) -> Path:
    source = folder / "src"
    source.mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "experiment": "from src import models",
        "models": MODELS,
        "sizes": f"WIDTH = {width}",
        "layers": "class Linear: pass",
    }.items():
        Path(source, f"{name}.py").write_text(text)
    return folder


def test_two_experiments_are_open_at_once(tmp_path: Path) -> None:
    """Also if a function imports when it is called, and whatever `src` is in this process."""
    before = sys.modules.get("src")
    nets = []
    for width in (3, 5):
        node = private({"_target_": "src.models.Net"}, project(tmp_path / str(width), width))
        nets.append(build(node, "models"))
    assert [net.width for net in nets] == [3, 5]
    assert [net.late() for net in nets] == [3, 5]
    assert type(nets[0]) is not type(nets[1])
    assert sys.modules.get("src") is before
