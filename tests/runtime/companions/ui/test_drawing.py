"""The experiment drawn: what the pictures show, and that names from code are text in them."""

import asyncio
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import Mlx
from hostile import TEXTS

from mlx_runtime.companions.ui.drawing import drawing_tab, structure_of, to_mermaid, to_svg, to_tables

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

    def forward(self, image):
        x = self.first(image.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.tied(self.again(self.head(x)))
"""


JOINS = """
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1, 8)

    def forward(self, x):
        return x + self.table(torch.zeros(1, dtype=torch.long, device=x.device))


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError


class DigitsNet(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.first, self.offset, self.fails = nn.Linear(64, width), Offset(), Fails()
        self.normed, self.turned, self.head = weight_norm(nn.Linear(width, width)), nn.Identity(), nn.Linear(width, 10)

    def forward(self, image):
        x = self.offset(self.first(image.flatten(1)))
        written = torch.zeros(x.shape, device=x.device)
        written[:, :] = self.normed(x)
        logits = self.head(self.turned(written.T).T)
        try:
            return self.fails(logits)
        except ValueError:
            return logits
"""


def rows_of(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield row
    for inner in row["modules"]:
        yield from rows_of(inner)


def table_of(page: str) -> list[list[str]]:
    """Return the cells of a table below its title."""
    return [line.split("</td><td>") for line in re.findall(r"<tr><td>(.*)</td></tr>", page)][1:]


def arrows_of(page: str) -> set[tuple[str, str]]:
    """Return the names of the boxes that arrows connect."""
    names = dict(re.findall(r'(n\d+)\S{1,3}"(\w+)', page))
    return {(names[start], names[end]) for start, end in re.findall(r"(n\d+) --> (n\d+)", page)}


@pytest.fixture
def drawn(digits: Path, mlx: Mlx) -> Path:
    """An experiment whose model has repeated, shared and lazy modules, and shared parameters."""
    (digits / "src" / "models.py").write_text(MODELS)
    (digits / "src" / "conf.yaml").unlink()
    return digits


@pytest.mark.process
def test_the_command_draws_modules_with_shapes_and_the_wiring(drawn: Path, mlx: Mlx) -> None:
    done = mlx(drawn, "train", "draw", "-o", "net.md", "--depth", "2", "models.net.blocks=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "wrote net.md"
    page = (drawn / "net.md").read_text()
    assert table_of(page) == [
        ["net", "DigitsNet", "(n, 10)", "946", "models.net"],
        ["· first", "Linear", "(n, 8)", "520", "models.net.first"],
        ["· blocks", "ModuleList", "", "264", ""],
        *([f"· · {number}", "Block", "(n, 8)", "88", ""] for number in range(3)),
        ["· head", "Linear", "(n, 8)", "72", ""],
        ["· again", "Linear", "(n, 8)", "72", ""],
        ["· tied", "Linear", "(n, 10)", "90", ""],
    ]
    wiring = {("train", "first"), ("train", "cross_entropy"), ("tied", "cross_entropy"), ("cross_entropy", "adam")}
    assert arrows_of(page) == wiring | {("first", "0"), ("0", "1"), ("1", "2"), ("2", "head"), ("head", "tied")}
    assert not (drawn / "runs").exists()
    refused = mlx(drawn, "train", "draw", "-o", "net.png")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "net.png is neither a .md nor a .svg file" in refused.stderr


@pytest.mark.process
def test_arrows_follow_joins_writes_and_failures(drawn: Path, mlx: Mlx) -> None:
    (drawn / "src" / "models.py").write_text(JOINS)
    done = mlx(drawn, "train", "draw", "--depth", "1")
    assert done.returncode == 0, done.stderr
    page = (drawn / "model.md").read_text()
    assert arrows_of(page) == {
        *[("train", "first"), ("first", "offset"), ("offset", "normed"), ("normed", "turned"), ("turned", "head")],
        *[("train", "cross_entropy"), ("head", "cross_entropy"), ("cross_entropy", "adam")],
    }
    shapes = {name: shape for name, _, shape, *_others in table_of(page)}
    assert [shapes[f"· {name}"] for name in ("offset", "fails", "turned")] == ["(n, 8)", "", "(8, n)"]


LOOP = """\
        for batch_idx, batch in enumerate(loader):
            if self.cfg.seed == 1:
                raise ValueError("no batch\\nhere")
            if self.cfg.seed == 2:
                __import__("os")._exit(3)
            mean = batch["image"].mean().item()  # which tensors without memory do not have
            logits"""


@pytest.fixture(scope="module")
def project(bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment whose model has an odd name, and whose loop reads values and fails with some seeds."""
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("drawing") / "digits"))
    with (folder / "src" / "models.py").open("a") as file:
        file.write('\n\nDigitsNet.__name__ = "::lucide:rocket::<b>"\n')
    loop = "        for batch_idx, batch in enumerate(loader):\n            logits"
    code = folder / "src" / "experiment.py"
    code.write_text(code.read_text().replace(loop, LOOP, 1))
    return folder


@pytest.mark.process
def test_the_tab_shows_names_as_text(project: Path) -> None:
    page = asyncio.run(drawing_tab(project)._element()).text
    assert "<td>::lucide:rocket::&lt;b&gt;</td>" in page
    assert "<td>(n, 10)</td>" in page
    assert "<marimo-mermaid" in page
    assert "iconify" not in page


@pytest.mark.process
@pytest.mark.parametrize(
    ("seed", "note"),
    [(1, "ValueError: no batch"), (2, f"{DESCRIBE} returned nothing: its process ended")],
)
def test_a_loop_that_fails_leaves_the_modules(project: Path, seed: int, note: str) -> None:
    before = {name for name in sys.modules if name.partition(".")[0] == "src"}  # of other tests
    (net,) = structure_of(project, [f"cfg.seed={seed}"])["models"]
    assert (net["note"], net["shape"], net["parameters"]) == (f"no shape: {note}", "", 21_482)
    marked = [row["node"] for row in rows_of(net) if row["node"]]
    assert marked == ["models.net", "models.net.first", "models.net.second", "models.net.head"]
    assert {name for name in sys.modules if name.partition(".")[0] == "src"} == before


def row(key: str, text: str, *modules: Any) -> dict[str, Any]:
    facts = {"name": text, "class": text, "node": text, "shape": text, "note": text}
    return {"key": key, **facts, "parameters": 1, "modules": [*modules]}


XSS = (
    '"]; click n0 call alert(1)',
    "<img src=x onerror=alert(1)>",
    "</text><script>alert(1)</script>",
    "![x](http://evil/a.png)",
    "http://evil/a.png",
    "`x` | <b>",
    "#quot; &lt;",
    "%%{init: {}}%%",
    "::lucide:rocket::",
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
    others = r"flowchart TD|classDef conf [\w:-]+|end|class n\d+ conf|n\d+ --> n\d+"
    for line in to_mermaid(structure).splitlines():
        assert re.fullmatch(f"{shape}|{others}", line)
    assert {item.tag for item in ElementTree.fromstring(to_tables(structure)).iter()} == {"table", "tr", "td"}


@pytest.mark.pure
def test_modules_below_the_depth_are_part_of_the_one_above() -> None:
    layers = [row(f"models.a.{n}", f"layer{n}", row(f"models.a.{n}.0", "part")) for n in range(3)]
    structure = {"datasets": [], "losses": [], "optimizers": [], "models": [row("models.a", "a", *layers)]}
    structure["edges"] = [[f"models.a.{n}.0", f"models.a.{n + 1}.0"] for n in range(2)] + [["datasets.x", "models.a.0"]]
    assert "part" not in to_mermaid(structure, 1)
    assert arrows_of(to_mermaid(structure, 1)) == {("layer0", "layer1"), ("layer1", "layer2")}
    assert to_mermaid(structure, 0).count("layer") == to_svg(structure, 0).count("layer") == 0
