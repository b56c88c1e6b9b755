"""Weights from elsewhere: `cfg.transfer` and `mlx xp surgery`."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Mlx
from hub_server import Hub
from torch import nn

from mlx_runtime import open_run
from mlx_runtime.companions.sharding import tensor_files
from mlx_runtime.companions.surgery.rules import Transfer, named, treatments, unused
from mlx_runtime.companions.surgery.sources import MARK, find, mean, read
from mlx_runtime.companions.surgery.transferring import Plan, named_tensors
from mlx_runtime.errors import ConfigError

pytestmark = pytest.mark.process

SHAPES = {"backbone.0.weight": (4, 3), "backbone.0.bias": (4,), "head.weight": (2, 4), "embed": (8, 3)}


def transfer(*rules: Any, **fields: Any) -> Transfer:
    return Transfer.parse({"source": "x", "rules": list(rules), **fields}, "cfg.transfer.net")


def applied(targets: dict[str, tuple[int, ...]], *rules: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the treatment of each tensor of a model as (how, source, region), and the unused tensors."""
    given = transfer(*rules)
    found = named(given, SHAPES, "the source")
    made = treatments(given, found, SHAPES, {tuple(name.split("|")): shape for name, shape in targets.items()})
    return {item.names[0]: (item.how, item.sources, item.region) for item in made}, unused(found, made)


@pytest.mark.pure
def test_every_tensor_of_the_model_is_accounted_for() -> None:
    made, left = applied(
        {"encoder.0.weight": (4, 3), "encoder.0.bias": (4,), "classifier.weight": (5, 4), "embed|tied": (6, 5)},
        {"drop": "head.*"},
        {"map": {"backbone.*.*": "encoder.*.*"}},
        {"fresh": "classifier.*"},
        {"slice": {"embed": 0}},
        {"pad": {"tied": 1}},
    )
    renaming = "map backbone.*.* → encoder.*.*"
    assert made == {
        "encoder.0.weight": (renaming, ("backbone.0.weight",), (4, 3)),
        "encoder.0.bias": (renaming, ("backbone.0.bias",), (4,)),
        "classifier.weight": ("fresh classifier.*", (), ()),
        "embed": ("same name, slice embed in dimension 0, pad tied in dimension 1", ("embed",), (6, 3)),
    }
    assert left == []
    made, left = applied({"head.weight": (2, 4), "embed": (8, 3)}, {"fresh": "head.*"})
    assert left == ["backbone.0.weight", "backbone.0.bias", "head.weight"]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("targets", "rules", "problem"),
    [
        ({"embed": (8, 3)}, [{"drop": "hed.*"}], "drop hed.* matches no tensor of the source. Did you mean 'head.*'?"),
        ({"embed": (8, 3)}, [{"fresh": "embd"}], "fresh embd matches no tensor of the model. Did you mean 'embed'?"),
        ({"embed": (8, 3), "new": (1,)}, [], "1 of 2 tensors of the model are not in the source: new."),
        ({"embed": (9, 3)}, [], "embed is (9, 3) here and (8, 3) in the source as embed (same name); slice takes"),
        ({"embed": (9, 3)}, [{"slice": {"embed": 0}}], "as embed (same name, slice embed in dimension 0); slice takes"),
        ({"embed": (8,)}, [{"pad": {"*": 1}}], "embed is (8,) here and (8, 3) in the source"),
        (
            {"encoder.0.bias": (4, 1)},
            [{"map": {"backbone.*": "encoder.*"}}],
            "(4, 1) here and (4,) in the source as backbone.0.bias (map backbone.* → encoder.*)",
        ),
        (
            {"embed": (8, 3)},
            [{"map": {"embed": "e"}}, {"drop": "e"}],
            "two rules are for embed: map embed → e, and drop e;",
        ),
        (
            {"e": (8, 3)},
            [{"slice": {"e": 0}}, {"fresh": "*"}],
            "two rules are for e: fresh *, and slice e in dimension 0;",
        ),
        ({"e": (8, 3)}, [{"map": {"embed": "e"}}, {"fresh": "e"}], "two rules are for e: fresh e, and map embed → e;"),
        (
            {"embed": (4, 3)},
            [{"slice": {"embed": 0, "em*": 0}}],
            "two rules are for embed: slice embed in dimension 0, and slice em* in dimension 0;",
        ),
        ({"embed": (8, 3)}, [{"map": {"head.weight": "embed"}}], "both embed and head.weight would be embed; drop one"),
    ],
)
def test_rules_that_do_not_fit_are_named(targets: Any, rules: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^cfg.transfer.net: .*{re.escape(problem)}"):
        applied(targets, *rules)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"rules": []}, ": source is missing"),
        ({"source": []}, ": source is a list, not text, or a list of text"),
        ({"source": "x", "rule": []}, " has no 'rule'; it has source, model, rules"),
        ({"source": "x", "rules": [{"mapp": {}}]}, ".rules[0] is 'mapp', which is no rule. Did you mean 'map'?"),
        ({"source": "x", "rules": [{"slice": {"a": -1}}]}, ".rules[0]: slice takes a mapping of text to a dimension"),
        ({"source": "x", "rules": [{"map": {"a.*": "*.*"}}]}, ": map a.* → *.* has more * in the new name"),
    ],
)
def test_a_node_that_is_no_transfer_is_refused(node: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^cfg.transfer.net{re.escape(problem)}"):
        Transfer.parse(node, "cfg.transfer.net")


def test_a_repository_of_the_hub_is_pinned_to_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = Path(weights_file(tmp_path / "net.safetensors", {"w": torch.ones(2)})).read_bytes()
    with Hub() as hub:
        for name, value in (hub.variables() | {"MLX_CACHE": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # it is read on import
        repository = hub.create("alice/net", {"model.safetensors": content, "sub/other.safetensors": b""})
        pinned = read(find("hf://alice/net", pytest.fail)).pinned
        assert pinned.startswith(f"hf://alice/net@{repository.commits[-1].sha}{MARK}")
        hub.commit(repository, "retrained", {"model.safetensors": content[::-1]})
        assert torch.equal(read(pinned).of("net")["w"], torch.ones(2))
        hub.commit(repository, "removed", {"weights.gguf": b""})
        with pytest.raises(ConfigError, match="hf://alice/net@.* has no weights in the format of safetensors"):
            read(find("hf://alice/net", pytest.fail))


def weights_file(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    with path.open("wb") as file:
        tensor_files.write(file, tensors)
    return str(path)


@pytest.mark.pure
def test_sources_are_averaged_and_types_are_checked(tmp_path: Path) -> None:
    one = {"w": torch.tensor([1.0, 3e5]), "n": torch.tensor(3)}
    other = {"w": torch.tensor([2.0, 1e5]), "n": torch.tensor(9)}
    paths = [weights_file(tmp_path / f"{number}.safetensors", item) for number, item in enumerate((one, other))]
    plan = Plan(transfer(source=paths), "net", {("w",): (2,), ("n",): ()})
    assert torch.equal(plan.part(("w",), torch.float32)[0], torch.tensor([1.5, 2e5]))  # type: ignore[index]
    assert plan.part(("n",), torch.int64)[0] == 3  # type: ignore[index]
    assert any(line.endswith("of the first source, not averaged: n") for line in plan.lines())
    plan.part(("w",), torch.bfloat16)
    assert plan.lines()[-1].endswith("    1  rounded from float32 to bfloat16: w")
    with pytest.raises(ConfigError, match="float16 cannot hold the values of w, float32 in the source"):
        plan.part(("w",), torch.float16)
    with pytest.raises(ConfigError, match="n is int32 here and int64 in the source"):
        plan.part(("n",), torch.int32)
    third = weights_file(tmp_path / "third.safetensors", {"w": torch.ones(2).half(), "n": torch.tensor(3)})
    with pytest.raises(
        ConfigError, match=r"0\.safetensors and .*third\.safetensors have no mean, because .* differ in w"
    ):
        Plan(transfer(source=[paths[0], third]), "net", {})


@pytest.mark.pure
def test_a_file_is_pinned_and_refused_once_it_has_changed(tmp_path: Path) -> None:
    content: Any = {"w": torch.arange(6.0).view(2, 3).to(torch.bfloat16), "flag": torch.tensor([True])}
    path = weights_file(tmp_path / "net.safetensors", content)
    torch.save({"net": content, "epoch": 3}, tmp_path / "net.pth")
    for source in (path, str(tmp_path / "net.pth")):
        found = read(find(source, pytest.fail))
        assert all(torch.equal(found.of("net")[name], item) for name, item in content.items())
        assert found.pinned.startswith(f"{source}{MARK}")
        assert read(find(found.pinned, pytest.fail)) is not None
        Path(source).write_bytes(Path(source).read_bytes() + b" ")
        with pytest.raises(ConfigError, match="net.* has changed: its SHA-256 is"):
            read(found.pinned)
    for content, problem in (
        (nn.Linear(1, 1), "has no weights that can be loaded"),  # pickled code
        ({"models": [1]}, "has no weights that can be loaded"),
        ({"net": {3: torch.ones(1), "w": torch.ones(2).to_sparse()}}, "contains no tensors"),
        ({"net": {"w\x1b[2J": torch.ones(1)}}, r"contains a tensor or model 'w\\x1b\[2J', a name that does not print"),
    ):
        torch.save(content, tmp_path / "net.pth")
        with pytest.raises(ConfigError, match=f"net.pth {problem}"):
            read(str(tmp_path / "net.pth"))
    (tmp_path / "net.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="net.safetensors has no weights that can be loaded"):
        read(path)
    with pytest.raises(ConfigError, match="cannot read .*gone.pt: No such file"):
        read(str(tmp_path / "gone.pt"))


@pytest.mark.pure
def test_tied_tensors_need_one_name_in_the_source_and_equal_values(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "out": nn.Linear(2, 3, bias=False)})
    model["out"].weight = model["embed"].weight
    targets = {names: tuple(item.shape) for names, item in named_tensors(model).items()}
    assert targets == {("embed.weight", "out.weight"): (3, 2)}
    one = weights_file(tmp_path / "one.safetensors", {"out.weight": torch.ones(3, 2)})
    assert Plan(transfer(source=one), "net", targets).part(*targets, torch.float32) is not None
    both = {"out.weight": torch.ones(3, 2), "embed.weight": torch.zeros(3, 2)}
    two = weights_file(tmp_path / "two.safetensors", both)
    with pytest.raises(ConfigError, match=r"embed.weight and out.weight are one tensor here, and differ in the source"):
        Plan(transfer(source=two), "net", targets).part(*targets, torch.float32)


@pytest.fixture(scope="module")
def folder(mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with a run of two epochs, `run_001`, whose model has 16 channels."""
    folder = make_in("faults", tmp_path_factory.mktemp("transfer"))
    done = mlx(folder, "train", "run", "cfg.start_workers=0", "cfg.num_epochs=2")
    assert done.returncode == 0, done.stderr
    return folder


def wide(folder: Path) -> list[str]:
    """Return overrides for a model with 24 channels, of which the first 16 begin with the mean of two checkpoints."""
    node = "{source:[faults/run_001@epoch_0001,run_001@epoch_0002],rules:["
    node += "{pad:{layers.0.*:0,layers.1.*:0}},{pad:{layers.3.weight:1}}]}"
    return ["models.net.width=24", "optimizers.adam.lr=0", "cfg.num_epochs=1", f"+cfg.transfer.net={node}"]


def weights(folder: Path, run: str, which: str = "latest") -> dict[str, torch.Tensor]:
    return open_run(str(folder / "runs" / "faults" / run)).state(which)["models"]["net"]  # type: ignore[no-any-return]


@pytest.mark.local
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_wider_model_begins_with_the_mean_of_two_checkpoints(mlx: Mlx, folder: Path, strategy: str) -> None:
    here = Path(shutil.copytree(folder, folder.parent / strategy))
    done = mlx(here, "train", "run", *wide(here), f"cfg.strategy={strategy}")
    assert done.returncode == 0, done.stderr
    sources = [str(here / "runs" / "faults" / "run_001" / "checkpoints" / f"epoch_000{number}") for number in (1, 2)]
    assert f"transfer  net from {' and '.join(sources)}\n" in done.stdout
    assert (
        "\n              4  same name, pad layers.1.* in dimension 0: layers.1.weight, …, layers.1.running_var\n"
        in done.stdout
    )
    one, two = (weights(here, "run_001", which) for which in ("epoch_0001", "epoch_0002"))
    found = weights(here, "run_002")
    for name in ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.3.bias"):
        expected = mean(name, [one, two])
        assert torch.equal(found[name][: len(expected)], expected), name
    assert found["layers.3.weight"][:, 16:].abs().min() > 0
    table = json.loads((here / "runs" / "faults" / "run_002" / "transfer.json").read_text())["net"]
    record = json.loads((here / "runs" / "faults" / "run_002" / "run.json").read_text())
    assert record["transfer"]["net"].keys() == {*sources}
    assert [MARK.join(item) for item in record["transfer"]["net"].items()] == table["sources"]
    assert len(table["tensors"]) == 10


def test_a_resume_never_reads_the_source(mlx: Mlx, folder: Path) -> None:
    here = Path(shutil.copytree(folder, folder.parent / "resumed"))
    assert mlx(here, "train", "run", *wide(here), "cfg.start_workers=0").returncode == 0
    shutil.rmtree(here / "runs" / "faults" / "run_001")
    resumed = mlx(here, "train", "run", "--resume=run_002", "cfg.num_epochs=2")
    assert resumed.returncode == 0, resumed.stderr
    assert "transfer  net" not in resumed.stdout
    other = mlx(here, "train", "run", "--resume=run_002", "cfg.num_epochs=3", "cfg.transfer=null")
    assert (other.returncode, "it cannot change within a run" in other.stderr) == (1, True)
    again = mlx(here, "train", "run", "--from=run_002")
    gone = here / "runs" / "faults" / "run_001" / "checkpoints" / "epoch_0001"
    assert (again.returncode, str(gone) in again.stderr) == (1, True)
    assert not (here / "runs" / "faults" / "run_003").exists()
    started = mlx(here, "train", "run", "--from=run_002@latest", "cfg.num_epochs=3")
    assert started.returncode == 0, started.stderr
    assert "note      all weights are from cfg.restore_checkpoint_path, none of cfg.transfer\n" in started.stdout


def test_nothing_is_written_for_a_source_that_does_not_fit(mlx: Mlx, folder: Path) -> None:
    for node, problem in (
        ("{source:run_009}", "cfg.transfer.net.source: "),
        ("{source:run_001,model:body}", "has the models net; choose one of them with model"),
        ("{source:run_001,rules:[{drop:layer.*}]}", "Did you mean 'layers.*'?"),
    ):
        refused = mlx(folder, "train", "run", f"+cfg.transfer.net={node}")
        assert (refused.returncode, problem in refused.stderr) == (1, True), refused.stderr
        assert refused.stderr.count("\n") == 1
    refused = mlx(folder, "train", "run", "+cfg.transfer.body={source:run_001}")
    assert "cfg.transfer.body: there is no model 'body'. " in refused.stderr
    old = mlx(folder, "train", "run", "cfg.restore_strict=false")
    assert "Weights from elsewhere come from cfg.transfer." in old.stderr
    assert [path.name for path in (folder / "runs" / "faults").glob("run_*")] == ["run_001"]


def test_a_checkpoint_is_inspected_and_rewritten(mlx: Mlx, folder: Path) -> None:
    here = Path(shutil.copytree(folder, folder.parent / "inspected"))
    listed = mlx(here, "xp", "surgery", "run_001@epoch_0001", "run_001", "--json")
    rows = {row["tensor"]: row for row in json.loads(listed.stdout)}
    one, two = (weights(here, "run_001", which) for which in ("epoch_0001", "epoch_0002"))
    row = rows["net.layers.0.weight"]
    change = (two["layers.0.weight"] - one["layers.0.weight"]).norm() / one["layers.0.weight"].norm()
    assert (row["shape"], row["dtype"], row["zeros"]) == ([16, 6], "float32", 0.0)
    expected = float(two["layers.0.weight"].norm()), float(change)
    assert (row["norm"], row["change"]) == pytest.approx(expected, rel=1e-5)
    (here / "rules.yaml").write_text('rules:\n- drop: "layers.3.*"\n- map: {"layers.*": "body.*"}\n')
    command = ("xp", "surgery", "run_001", "--rules", "rules.yaml", "--to", "body.safetensors")
    written = mlx(here, *command)
    assert written.returncode == 0, written.stderr
    assert read(str(here / "body.safetensors")).models[""].keys() == {
        name.replace("layers", "body") for name in two if not name.startswith("layers.3")
    }
    again = mlx(here, *command)
    assert (again.returncode, "body.safetensors exists" in again.stderr) == (2, True)
    compared = mlx(here, "xp", "surgery", "run_001", "body.safetensors")
    assert re.search(r"^net\.layers\.0\.weight .* removed$", compared.stdout, re.MULTILINE)
    assert re.search(r"^body\.0\.weight .* added$", compared.stdout, re.MULTILINE)
    conf = here / "src" / "conf.yaml"
    rules = "[map: {body.*: layers.*}, fresh: layers.3.*]"
    conf.write_text(
        conf.read_text().replace(
            "cfg:\n", f"cfg:\n  transfer:\n    net: {{source: body.safetensors, rules: {rules}}}\n"
        )
    )
    assert mlx(here, "train", "bind", "--check").returncode == 0
    started = mlx(here, "train", "run", "cfg.start_workers=0", "cfg.num_epochs=0")
    assert "    2  fresh layers.3.*: layers.3.weight, layers.3.bias\n" in started.stdout, started.stderr
    (here / "rules.yaml").write_text('rules:\n- fresh: "layers.3.*"\n')
    mixed = mlx(here, "xp", "surgery", "run_001", "run_001@epoch_0001", *command[3:6], "mixed.safetensors")
    assert mixed.returncode == 0, mixed.stderr
    made = read(str(here / "mixed.safetensors")).models[""]
    assert all(torch.equal(item, (one if "layers.3" in name else two)[name]) for name, item in made.items())
    start = (
        "cfg.transfer=null",
        "cfg.start_workers=0",
        "cfg.num_epochs=0",
        "cfg.restore_checkpoint_path=mixed.safetensors",
    )
    whole = mlx(here, "train", "run", *start)
    assert "\n             10  same name: " in whole.stdout, whole.stderr
