"""The code stored with a run, and its import next to the code of other experiments."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mlx_runtime import MlxError
from mlx_runtime.config.building import build
from mlx_runtime.errors import ConfigError
from mlx_runtime.runs import snapshots
from mlx_runtime.runs.folder import RunFolder

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


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "storage" / "small" / "run_001")
    folder.path.mkdir(parents=True)
    return folder


NODE = {"_target_": "src.models.Net", "inner": [{"_target_": "src.layers.Linear"}]}


def test_two_experiments_are_open_at_once(tmp_path: Path) -> None:
    """Also if a function imports when it is called, and whatever `src` is in this process."""
    before = sys.modules.get("src")
    nets = []
    for width in (3, 5):
        node = snapshots.private({"_target_": "src.models.Net"}, project(tmp_path / str(width), width))
        nets.append(build(node, "models"))
    assert [net.width for net in nets] == [3, 5]
    assert [net.late() for net in nets] == [3, 5]
    assert type(nets[0]) is not type(nets[1])
    assert sys.modules.get("src") is before


def test_importing_stored_code_loads_no_data(tmp_path: Path) -> None:
    here = project(tmp_path, 3)
    (here / "src" / "__init__.py").write_text("import mlx_runtime\nmlx_runtime.defer_loading(__name__)")
    (here / "src" / "models.py").write_text(
        "made = []\nclass Rows:\n    def to_hf(self): ...\n    def __init__(self): made.append(self)\n"
        "class Net:\n    def __init__(self, rows=Rows()):\n        self.made = len(made)"
    )
    assert build(snapshots.private({"_target_": "src.models.Net"}, here), "models").made == 0


def test_targets_in_src_are_renamed_and_others_are_not(tmp_path: Path) -> None:
    node = {"a": [NODE, {"_target_": "torch.nn.Linear", "name": "src.models"}], "b": "src.models.Net"}
    made = snapshots.private(node, tmp_path)
    assert made["a"][0]["_target_"].endswith(".src.models.Net")
    assert made["a"][0]["inner"][0]["_target_"].endswith(".src.layers.Linear")
    assert made["a"][1] == node["a"][1]
    assert made["b"] == node["b"]


def test_a_snapshot_holds_code_and_no_data(tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    here = project(tmp_path / "here", 3)
    here.joinpath(".gitignore").write_text("ignored/\n")
    for name, size in {"ignored/x.py": 1, "weights.bin": 2 << 20, "main.py": 10, "mlx_runtime/a.py": 1}.items():
        here.joinpath(name).parent.mkdir(exist_ok=True)
        here.joinpath(name).write_bytes(b"#" * size)
    snapshots.store(here, run)
    source = {f"src/{name}.py" for name in ("__init__", "experiment", "models", "sizes", "layers")}
    assert set(zipfile.ZipFile(run.path / "code.zip").namelist()) == source | {"main.py", ".gitignore"}
    monkeypatch.setattr(snapshots, "ALL_BYTES", sum(here.joinpath(name).stat().st_size for name in source))
    snapshots.store(here, run)
    assert set(zipfile.ZipFile(run.path / "code.zip").namelist()) == source
    assert sorted(file.name for file in run.path.iterdir()) == ["code.zip"]


@pytest.mark.parametrize("in_git", [True, False])
def test_a_snapshot_holds_what_is_tracked_imported_or_listed(in_git: bool, tmp_path: Path, run: RunFolder) -> None:
    """src/{__init__,experiment,models,sizes,layers,named,lazy}.py src/conf.yaml src/variants/a.yaml main.py …"""
    here = project(tmp_path / "here", 3)
    code = {
        "main.py": "import helper\n",
        "helper.py": "",
        "src/experiment.py": "from src.models import Net\ndef f():\n    from src import lazy\n",
        "src/lazy.py": "",
        "src/named.py": "class Loss: ...",
        "src/conf.yaml": "losses: {loss: {_target_: src.named.Loss}}\n",
        "src/variants/a.yaml": "cfg: {seed: 1}\n",
    }
    loose = ("prod.env", "secrets.yaml", "token.txt", "src/scratch.py", "src/broken.py", "notes.md", "data/words.txt")
    for name, text in {**code, **dict.fromkeys(loose, "def broken(:"), "data/tracked.txt": "x"}.items():
        here.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        here.joinpath(name).write_text(text)
    if in_git:
        subprocess.run(["git", "init", "-q"], cwd=here, check=True)
        subprocess.run(["git", "add", "data/tracked.txt", "src/experiment.py"], cwd=here, check=True)
    snapshots.store(here, run, ("data/words.*", "*.env"))
    source = {f"src/{name}.py" for name in ("__init__", "models", "sizes", "layers")}
    expected = {*code, *source, "data/words.txt", *(["data/tracked.txt"] if in_git else [])}
    assert set(zipfile.ZipFile(run.path / "code.zip").namelist()) == expected
    assert snapshots.changed_files(here, run) == []
    (here / "src/sizes.py").write_text("WIDTH = 4")
    (here / "src/lazy.py").unlink()
    assert snapshots.changed_files(here, run) == ["src/lazy.py", "src/sizes.py"]


def test_stored_code_is_imported_once_unpacked(tmp_path: Path, run: RunFolder) -> None:
    snapshots.store(project(tmp_path / "here", 7), run)
    folder = snapshots.unpack(run)
    assert snapshots.unpack(run) == folder
    assert build(snapshots.private({"_target_": "src.models.Net"}, folder), "models").width == 7


@pytest.mark.parametrize(("content", "message"), [(None, "has no stored code"), (b"no zip", "code.zip is damaged")])
def test_no_or_damaged_code_is_one_line(content: bytes | None, message: str, run: RunFolder) -> None:
    if content is not None:
        (run.path / "code.zip").write_bytes(content)
    with pytest.raises(MlxError, match=message):
        snapshots.unpack(run)


def test_a_listed_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    folder = project(tmp_path / "one", 1)
    snapshots.refuse_unmatched(folder, ["sizes.py", "!models.py"])
    with pytest.raises(ConfigError, match="cfg.code_files names 'nope.txt', which matches no file"):
        snapshots.refuse_unmatched(folder, ["sizes.py", "nope.txt"])
