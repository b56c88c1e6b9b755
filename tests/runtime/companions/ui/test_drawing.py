"""The experiment drawn: what the pictures show, and that names from code are text in them."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import Mlx
from hostile import TEXTS

from mlx_runtime.companions.ui.drawing import COLUMNS, structure_of, to_markdown, to_mermaid, to_svg

DESCRIBE = "mlx_runtime.companions.ui.structure:describe"

SVG = "{http://www.w3.org/2000/svg}"

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        return x + self.inner(self.norm(x))


class DigitsNet(nn.Module):
    def __init__(self, first: nn.Module = nn.Linear(64, 8), blocks: int = 5):
        super().__init__()
        self.first = first
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.LazyLinear(8)
        self.again = self.head
        self.tied = nn.Linear(8, 10)
        self.tied.bias = self.unused = nn.Parameter(torch.zeros(10))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, image):
        x = self.first(image.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.tied(self.again(self.head(x)))
"""


def rows_of(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield row
    for inner in row["modules"]:
        yield from rows_of(inner)


@pytest.fixture
def drawn(digits: Path, mlx: Mlx) -> Path:
    """An experiment whose model has repeated, shared and lazy modules, shared parameters and buffers."""
    (digits / "src" / "models.py").write_text(MODELS)
    (digits / "src" / "conf.yaml").unlink()
    return digits


@pytest.mark.process
def test_the_command_draws_modules_with_shapes_and_the_wiring(drawn: Path, mlx: Mlx) -> None:
    done = mlx(drawn, "train", "draw", "-o", "net.md", "--depth", "2", "models.net.blocks=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["wrote net.md", "net: DigitsNet with 946 parameters"]
    page = (drawn / "net.md").read_text()
    table = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")
    ]
    assert table == [
        ["net", "DigitsNet", "(n, 10)", "946", "3", "models.net"],
        ["· first", "Linear", "(n, 8)", "520", "", "models.net.first"],
        ["· blocks", "ModuleList", "", "264", "", ""],
        ["· · 0 … 2", "Block (x3)", "(n, 8)", "88", "", ""],
        ["· head", "Linear", "(n, 8)", "72", "", ""],
        ["· again", "Linear", "(n, 8)", "", "", "same as models.net.head"],
        ["· tied", "Linear", "(n, 10)", "80", "", "shared with models.net"],
    ]
    labels = dict(re.findall(r'(n\d+)\S{1,3}"(\w+)', page))
    arrows = {(labels[start], labels[end]) for start, end in re.findall(r"(n\d+) --> (n\d+)", page)}
    assert arrows >= {("train", "first"), ("first", "0"), ("0", "head"), ("tied", "cross_entropy")}
    assert arrows >= {("train", "cross_entropy"), ("cross_entropy", "adam")}
    assert not (drawn / "runs").exists()
    refused = mlx(drawn, "train", "draw", "-o", "net.png")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "net.png is neither a .md nor a .svg file" in refused.stderr


LOOP = """\
        for batch_idx, batch in enumerate(loader):
            if self.cfg.seed == 1:
                raise ValueError("no batch\\nhere")
            if self.cfg.seed == 2:
                __import__("os")._exit(3)
            mean = batch["image"].mean().item()  # which tensors without memory do not have
            logits"""


@pytest.mark.process
def test_a_loop_that_fails_leaves_the_modules(digits: Path) -> None:
    loop = "        for batch_idx, batch in enumerate(loader):\n            logits"
    file = digits / "src" / "experiment.py"
    file.write_text(file.read_text().replace(loop, LOOP, 1))
    notes = {
        1: "no shapes: ValueError: no batch",
        2: f"no shapes: {DESCRIBE} returned nothing: its process exited with code 3",
    }
    for seed in (0, 1, 2):
        (net,) = structure_of(digits, [f"cfg.seed={seed}"])["models"]
        assert net["note"] == notes.get(seed, "")
        assert net["shape"] == ("" if seed else "(n, 10)")
        assert net["parameters"] == 21_482
        marked = [row["node"] for row in rows_of(net) if row["node"]]
        assert marked == ["models.net", "models.net.first", "models.net.second", "models.net.head"]
    assert not {name for name in sys.modules if name.partition(".")[0] == "src"}


def row(key: str, text: str, *modules: Any) -> dict[str, Any]:
    facts = {"name": text, "class": text, "node": text, "shape": text, "note": text}
    return {"key": key, **facts, "parameters": 1, "buffers": 0, "modules": [*modules]}


XSS = (
    '"]; click n0 call alert(1)',
    "<img src=x onerror=alert(1)>",
    "</text><script>alert(1)</script>",
    "![x](http://evil/a.png)",
    "http://evil/a.png",
    "`x` | <b>",
    "#quot; &lt;",
    "%%{init: {}}%%",
    "end",
)


@pytest.mark.pure
@pytest.mark.parametrize("text", [*XSS, *TEXTS])
def test_names_are_text(text: str) -> None:
    structure = {group: [row(f"{group}.a", text)] for group in ("datasets", "losses", "optimizers")}
    models = [row("models.a", text, row("models.a.b", text), row("models.a.c", text + "2"))]
    structure |= {"name": text, "models": models, "edges": [["datasets.a", "models.a.b"]]}  # type: ignore[assignment]
    picture = ElementTree.fromstring(to_svg(structure))
    assert {item.tag.removeprefix(SVG) for item in picture.iter()} <= {"svg", "style", "marker", "path", "rect", "text"}
    shape = r"""(subgraph )?n\d+(\[\(|\{\{|\(\[|\[)"([\w ,()]|<br/>|#\d+;)*"(\)\]|\}\}|\]\)|\])"""
    others = r"flowchart TD|classDef conf [\w:-]+|end|class n\d+ conf|n\d+ (-->|~~~) n\d+"
    for line in to_mermaid(structure).splitlines():
        assert re.fullmatch(f"{shape}|{others}", line)
    rest = re.sub(r"```mermaid\n.*?```", "", to_markdown(structure), flags=re.DOTALL)
    assert not set(re.sub(r"`[^`\n]*`", "", rest)) - set("# |:-\n" + "".join(COLUMNS))


@pytest.mark.pure
def test_large_models_stay_readable() -> None:
    parts = [[row(f"models.a.{n}.{k}", f"part{k}") for k in range(20)] for n in range(9)]
    layers = [row(f"models.a.{n}", "layer", *parts[n]) for n in range(9)]
    layers[4]["shape"] = "another"
    structure = {"datasets": [], "losses": [], "optimizers": [], "name": "a", "models": [row("models.a", "a", *layers)]}
    structure["edges"] = [[f"models.a.{n}.0", f"models.a.{n + 1}.0"] for n in range(8)]
    assert to_mermaid(structure).count("part") == 0
    assert to_mermaid(structure, 2).count("part") == 3 * 3 * 20  # names, classes and shapes in three layers
    assert re.findall("n\\d --> n\\d", to_mermaid(structure)) == ["n1 --> n2", "n2 --> n3"]
