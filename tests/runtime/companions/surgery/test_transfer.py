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
from mlx_runtime.companions.surgery.inspection import tensor_rows
from mlx_runtime.companions.surgery.rules import match, named, parse, treatments
from mlx_runtime.companions.surgery.sources import INDEX, MARK, find, mean, read
from mlx_runtime.companions.surgery.transferring import Plan
from mlx_runtime.config.building import build_cfg
from mlx_runtime.config.checks import settings_problems
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.sections import Transfer

pytestmark = pytest.mark.process

SHAPES = {"backbone.0.weight": (4, 3), "backbone.0.bias": (4,), "head.weight": (2, 4), "embed": (8, 3)}


def transfer(*rules: Any, **fields: Any) -> Transfer:
    return parse({"source": "x", "rules": list(rules), **fields}, "cfg.transfer.net")


def applied(targets: dict[str, tuple[int, ...]], *rules: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the treatment of each tensor of a model, whose ties have names like `a|b`, and the unused tensors."""
    given = transfer(*rules)
    found = named(given, SHAPES, "the source")
    ties = {name: names.split("|") for names in targets for name in names.split("|")}
    shapes = {name: shape for names, shape in targets.items() for name in names.split("|")}
    made = treatments(given, found, SHAPES, shapes, ties)
    return made, [name for name, _ in found.values() if name not in {item.source for item in made.values()}]


@pytest.mark.pure
def test_every_tensor_of_the_model_is_accounted_for() -> None:
    made, left = applied(
        {"encoder.0.weight": (4, 3), "encoder.0.bias": (4,), "classifier.weight": (5, 4), "embed|tied": (6, 5)},
        {"drop": "head.*"},
        {"map": {"backbone.*.*": "encoder.*.*"}},
        {"fresh": "classifier.*"},
        {"slice": {"embed": 0}},
        {"pad": {"*": 1}},
    )
    renaming = "map backbone.*.* → encoder.*.*"
    assert made == {
        "encoder.0.weight": (renaming, "backbone.0.weight"),
        "encoder.0.bias": (renaming, "backbone.0.bias"),
        "classifier.weight": ("fresh classifier.*", None),
        "embed": ("same name, slice embed in dimension 0, pad * in dimension 1", "embed"),
        "tied": ("tied to embed", None),
    }
    assert left == []
    made, left = applied({"head.weight": (2, 4), "embed": (8, 3)}, {"fresh": "head.*"})
    assert left == ["backbone.0.weight", "backbone.0.bias", "head.weight"]


@pytest.mark.pure
def test_names_are_mapped_at_once_by_the_first_rule_that_matches() -> None:
    rules = [{"map": {"head.weight": "encoder.embed", "embed": "encoder.head.weight"}}, {"drop": "*.bias"}]
    found = named(transfer(*rules, {"map": {"*": "encoder.*"}}), SHAPES, "the source")
    assert {new: name for new, (name, _) in found.items()} == {
        "encoder.backbone.0.weight": "backbone.0.weight",
        "encoder.embed": "head.weight",
        "encoder.head.weight": "embed",
    }


@pytest.mark.pure
@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("a.*.*", {"a.b.c.d": ("b", "c.d")}),
        ("**d", {"a.b.c.d": ("", "a.b.c.")}),
        ("a.b", {"a.b": ()}),
        ("a.?", {"a.?": ()}),
        ("a[0].*", {"a[0].w": ("w",)}),
        ("*a" * 51, {"a" * 60: ("",) * 50 + ("a" * 9,)}),
    ],
)
def test_a_pattern_has_one_match(pattern: str, texts: dict[str, tuple[str, ...]]) -> None:
    """Only `*` is special. Trying all texts for 50 of them would take years."""
    assert match(pattern, ["a.b", "a.b.c.d", "a.?", "a[0].w", "ab", "a" * 60, "a" * 60 + "b"], "", "") == texts


@pytest.mark.pure
@pytest.mark.parametrize(
    ("targets", "rules", "problem"),
    [
        ({"embed": (8, 3)}, [{"drop": "hed.*"}], "drop hed.* matches no tensor of the source. Did you mean 'head.*'?"),
        ({"embed": (8, 3)}, [{"drop": "*"}], "the rules drop all tensors of the source"),
        ({"embed": (8, 3)}, [{"fresh": "embd"}], "fresh embd matches no tensor of the model. Did you mean 'embed'?"),
        ({"embed": (8, 3), "new": (1,)}, [], "1 of 2 tensors of the model are not in the source: new."),
        ({"embed": (9, 3)}, [], "embed is (9, 3) here and (8, 3) in the source as embed (same name); slice takes"),
        ({"embed": (9, 3)}, [{"slice": {"embed": 0}}], "as embed (same name, slice embed in dimension 0); slice takes"),
        ({"embed": (8,)}, [{"pad": {"*": 1}}], "embed is (8,) here and (8, 3) in the source"),
        ({"embed": (8, 3)}, [{"pad": {"*": 5}}], "pad * in dimension 5 changes no tensor"),
        (
            {"encoder.0.bias": (4, 1)},
            [{"map": {"backbone.*": "encoder.*"}}],
            "(4, 1) here and (4,) in the source as backbone.0.bias (map backbone.* → encoder.*)",
        ),
        ({"embed": (9, 3)}, [{"pad": {"embed": 0}}, {"fresh": "*"}], "fresh * changes no tensor"),
        ({"embed|tied": (8, 3)}, [{"fresh": "tied"}], "tied is fresh, and one tensor with embed, which is not;"),
        ({"embed": (8, 3)}, [{"map": {"head.weight": "embed"}}], "both head.weight and embed would be embed; drop one"),
    ],
)
def test_rules_that_do_not_fit_are_named(targets: Any, rules: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        applied(targets, *rules)


@pytest.mark.pure
def test_all_problems_of_transfers_are_reported() -> None:
    nodes: Any = {
        "a": {"source": 3, "rule": [], "model": 4},
        "c": {"source": "x", "rules": [{"mapp": {}}]},
        "d": {"source": "x", "rules": [{"slice": {"a": 0.5}}]},
    }
    found = [item.key for item in settings_problems({"transfer": nodes}, TrainConfig)]
    assert [key.removeprefix("cfg.transfer.") for key in found] == [
        "a.source",
        "a.rule",
        "a.model",
        "c.rules",
        "d.rules",
    ]
    nodes = {"b": {"source": [], "rules": [{"map": {}}, {"map": {"a.*": "*.*"}}]}, "e": "run_003"}
    cfg = build_cfg({"_target_": "mlx_runtime.TrainConfig", "transfer": nodes}, TrainConfig)
    assert TrainConfig.out_of_range(cfg) == [
        "cfg.transfer.b: map a.* → *.* has more * in the new name than in the pattern",
        "cfg.transfer.b: the source, or one of the rules, is empty",
        "cfg.transfer.e is 'run_003', not settings of mlx_runtime.sections.Transfer",
    ]


def test_a_repository_of_the_hub_is_pinned_to_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = Path(weights_file(tmp_path / "net.safetensors", {"w": torch.ones(2)})).read_bytes()
    with Hub() as hub:
        for name, value in (hub.variables() | {"MLX_CACHE": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # these are read on import
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        files = {"model.safetensors": content, "adapter.safetensors": b"", "sub/other.safetensors": b""}
        repository = hub.create("alice/net", files)
        pinned = read(find("hf://alice/net", pytest.fail)).pinned
        assert pinned.startswith(f"hf://alice/net@{repository.commits[-1].sha}{MARK}")
        hub.commit(repository, "retrained", {"model.safetensors": content[::-1]})
        assert torch.equal(read(pinned).of("net")["w"], torch.ones(2))
        other = Path(weights_file(tmp_path / "other.safetensors", {"v": torch.zeros(1)})).read_bytes()
        index = json.dumps({"weight_map": {"w": "one.safetensors", "v": "two.safetensors"}}).encode()
        parts = {"one.safetensors": content, "two.safetensors": other, "three.safetensors": b""}
        hub.commit(repository, "in parts", parts | {INDEX: index})
        assert read(find("hf://alice/net", pytest.fail)).of("net").keys() == {"w", "v"}
        hub.commit(repository, "several", parts)
        with pytest.raises(ConfigError, match="hf://alice/net@.* has no weights in the format of safetensors, or sev"):
            read(find("hf://alice/net", pytest.fail))


def weights_file(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    with path.open("wb") as file:
        tensor_files.write(file, tensors)
    return str(path)


class Given(nn.Module):
    """A model with these tensors as buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, item in tensors.items():
            self.register_buffer(name, item)


@pytest.mark.pure
def test_sources_are_averaged_and_types_are_checked(tmp_path: Path) -> None:
    one = {"w": torch.tensor([1.0, 3e5]), "n": torch.tensor(3)}
    other = {"w": torch.tensor([2.0, 1e5]), "n": torch.tensor(9)}
    paths = [weights_file(tmp_path / f"{number}.safetensors", item) for number, item in enumerate((one, other))]
    plan = Plan(transfer(source=paths), "net", Given(**one))
    assert torch.equal(plan.value("w", one["w"]), torch.tensor([1.5, 2e5]))  # type: ignore[arg-type]
    assert plan.value("n", one["n"]) == 3
    assert any(line.endswith("of the first source, not averaged: n") for line in plan.lines())
    plan.value("w", one["w"].bfloat16())
    assert plan.lines()[-1].endswith("    1  rounded from float32 to bfloat16: w")
    for dtype in (torch.float16, torch.float8_e4m3fn):
        with pytest.raises(ConfigError, match="float.* cannot hold the values of w, float32 in the source"):
            plan.value("w", one["w"].to(dtype))
    with pytest.raises(ConfigError, match="n is int32 here and int64 in the source"):
        plan.value("n", one["n"].int())
    third = weights_file(tmp_path / "third.safetensors", {"w": torch.ones(2).half(), "n": torch.tensor(3)})
    with pytest.raises(
        ConfigError, match=r"0\.safetensors and .*third\.safetensors have no mean, because .* differ in w"
    ):
        Plan(transfer(source=[paths[0], third]), "net", Given())
    eight = weights_file(tmp_path / "eight.safetensors", {"w": torch.ones(2).to(torch.float8_e5m2)})
    plan = Plan(transfer(source=[eight, eight]), "net", Given(w=torch.zeros(2)))
    assert torch.equal(plan.value("w", torch.zeros(2)), torch.ones(2))  # type: ignore[arg-type]
    assert tensor_rows(read(eight))[0]["norm"] == pytest.approx(2**0.5)


@pytest.mark.pure
def test_a_file_is_pinned_and_refused_once_it_has_changed(tmp_path: Path) -> None:
    content: Any = {"w": torch.arange(6.0).view(2, 3).to(torch.bfloat16), "flag": torch.tensor([True])}
    path = weights_file(tmp_path / "net.safetensors", content)
    torch.save(content, tmp_path / "net.pth")
    torch.save({"state_dict": content, "epoch": 3, "best": torch.ones(1)}, tmp_path / "net.pt")
    for source in (path, str(tmp_path / "net.pth"), str(tmp_path / "net.pt")):
        found = read(find(source, pytest.fail))
        assert found.pinned.startswith(f"{source}{MARK}")
        assert read(find(found.pinned, pytest.fail)) is not None
        Path(source).write_bytes(b"\xff" * Path(source).stat().st_size)
        assert all(torch.equal(found.of("net")[name], item) for name, item in content.items())  # what was hashed
        with pytest.raises(ConfigError, match="net.* (has changed: its SHA-256 is|has no weights that can be loaded)"):
            read(found.pinned)
    long = torch.as_strided(torch.ones(1), (10**9,), (0,))
    for content, problem in (
        (nn.Linear(1, 1), "has no weights that can be loaded"),  # pickled code
        ({"net": {"w": torch.ones(1)}}, "contains 'net', which is no plain tensor"),
        ({"w": torch.ones(2), "epoch": 3}, "contains 'epoch', which is no plain tensor"),
        ({"w": torch.ones(2).to_sparse()}, "contains 'w', which is no plain tensor"),
        ({"w": torch.ones(2, device="meta")}, "contains 'w', which is no plain tensor"),
        ({"w": long}, "contains 'w', which is no plain tensor"),
        (
            {"w\x1b[2J": torch.ones(1)},
            r"contains 'w\\x1b\[2J', which is no plain tensor, or a name that does",
        ),
    ):
        torch.save(content, tmp_path / "net.pth")
        with pytest.raises(ConfigError, match=f"net.pth {problem}"):
            read(str(tmp_path / "net.pth"))
    with pytest.raises(ConfigError, match="cannot read .*gone.pt: No such file"):
        read(str(tmp_path / "gone.pt"))
    with pytest.raises(UsageError, match="s3://b/x.safetensors: files are read from this machine only"):
        find("s3://b/x.safetensors", pytest.fail)


@pytest.mark.pure
def test_tied_tensors_need_one_name_in_the_source_and_equal_values(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "out": nn.Linear(2, 3, bias=False)})
    model["out"].weight = model["embed"].weight
    own = model["embed"].weight
    one = weights_file(tmp_path / "one.safetensors", {"out.weight": torch.ones(3, 2)})
    plan = Plan(transfer(source=one), "net", model)
    assert plan.value("embed.weight", own) is None
    assert plan.value("out.weight", own) is not None
    both = {"out.weight": torch.full((3, 2), torch.nan), "embed.weight": torch.full((3, 2), torch.nan)}
    two = weights_file(tmp_path / "two.safetensors", both)
    assert Plan(transfer(source=two), "net", model).value("out.weight", own) is not None
    three = weights_file(tmp_path / "three.safetensors", both | {"out.weight": torch.ones(3, 2)})
    with pytest.raises(ConfigError, match=r"embed.weight and out.weight are one tensor here, and differ in the source"):
        Plan(transfer(source=three), "net", model).value("embed.weight", own)


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
    scratch = mlx(here, "train", "run", *wide(here)[:-1], f"cfg.strategy={strategy}")
    assert scratch.returncode == 0, scratch.stderr
    one, two = (weights(here, "run_001", which) for which in ("epoch_0001", "epoch_0002"))
    found = weights(here, "run_002")
    for name in ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.3.bias"):
        expected = mean(name, [one, two])
        assert torch.equal(found[name][: len(expected)], expected), name
    assert torch.equal(found["layers.3.weight"][:, 16:], weights(here, "run_003")["layers.3.weight"][:, 16:])
    table = json.loads((here / "runs" / "faults" / "run_002" / "transfer.json").read_text())["net"]
    record = json.loads((here / "runs" / "faults" / "run_002" / "run.json").read_text())
    assert record["transfer"]["net"].keys() == {*sources}
    assert [MARK.join(item) for item in record["transfer"]["net"].items()] == table["sources"]
    assert len(table["tensors"]) == 10


@pytest.fixture(scope="module")
def wider(mlx: Mlx, folder: Path) -> Path:
    """The experiment with another run, `run_002`, that began with a transfer from `run_001`, which is gone."""
    here = Path(shutil.copytree(folder, folder.parent / "wider"))
    done = mlx(here, "train", "run", *wide(here), "cfg.start_workers=0")
    assert done.returncode == 0, done.stderr
    shutil.move(here / "runs" / "faults" / "run_001", here / "gone")
    return here


def test_the_same_command_resumes_and_never_reads_the_source(mlx: Mlx, wider: Path) -> None:
    here = wider
    overrides = [item for item in wide(here) if "num_epochs" not in item]
    resumed = mlx(here, "train", "run", "--resume=auto", *overrides, "cfg.num_epochs=2")
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming" in resumed.stdout or "restored  " in resumed.stdout
    assert "transfer  net" not in resumed.stdout
    other = mlx(here, "train", "run", "--resume=run_002", "cfg.num_epochs=3", "cfg.transfer=null")
    assert (other.returncode, "it cannot change within a run" in other.stderr) == (1, True)
    again = mlx(here, "train", "run", "--from=run_002")
    gone = here / "runs" / "faults" / "run_001" / "checkpoints" / "epoch_0001"
    assert (again.returncode, str(gone) in again.stderr) == (1, True)
    assert not (here / "runs" / "faults" / "run_003").exists()
    both = mlx(here, "train", "run", "--from=run_002@latest", *overrides)
    assert "cfg.transfer and cfg.restore_checkpoint_path exclude each other" in both.stderr
    started = mlx(here, "train", "run", "--from=run_002@latest", "cfg.num_epochs=3")
    assert started.returncode == 0, started.stderr


def test_a_run_without_checkpoints_may_name_another_source(mlx: Mlx, wider: Path) -> None:
    here = Path(shutil.copytree(wider, wider.parent / "renamed"))
    shutil.rmtree(here / "runs" / "faults" / "run_002" / "checkpoints")
    record = here / "runs" / "faults" / "run_002" / "run.json"
    facts = json.loads(record.read_text())
    record.write_text(json.dumps(facts | {"status": "FAILED", "latest": None, "best": None}))
    shutil.move(here / "gone", here / "runs" / "faults" / "run_009")
    refused = mlx(here, "train", "run", "--resume=run_002")
    assert (refused.returncode, "name another source" in refused.stderr) == (1, True), refused.stderr
    named = mlx(here, "train", "run", "--resume=run_002", "cfg.transfer.net.source=run_009")
    assert named.returncode == 0, named.stderr
    assert f"transfer  net from {here / 'runs' / 'faults' / 'run_009' / 'checkpoints' / 'epoch_0002'}\n" in named.stdout


def test_a_model_loads_values_itself(mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path: Path) -> None:
    here = make_in("faults", tmp_path)
    [file] = [path for path in (here / "src").glob("*.py") if "class Net" in path.read_text()]
    file.write_text(file.read_text() + RENAMED)
    first = mlx(here, "train", "run", "cfg.start_workers=0", "cfg.num_epochs=1")
    assert first.returncode == 0, first.stderr
    start = ("cfg.start_workers=0", "cfg.num_epochs=1", "optimizers.adam.lr=0", "+cfg.transfer.net.source=run_001")
    second = mlx(here, "train", "run", *start)
    assert second.returncode == 0, second.stderr
    assert "no tensor, and stays initial: _extra_state" in second.stdout
    one, two = weights(here, "run_001"), weights(here, "run_002")
    assert torch.equal(one["body.0.weight"], two["body.0.weight"])


RENAMED = """

def _renamed(module, state, prefix, _):
    for name in [name for name in state if name.startswith(prefix + "layers.")]:
        state[name.replace("layers.", "body.", 1)] = state.pop(name)


def _restored(module, state, prefix, *_):
    for name in [name for name in state if name.startswith(prefix + "body.")]:
        state[name.replace("body.", "layers.", 1)] = state.pop(name)


_init = Net.__init__


def init(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    self.register_state_dict_post_hook(_renamed)
    self.register_load_state_dict_pre_hook(_restored)


Net.__init__ = init
Net.get_extra_state = lambda self: {"version": 1}
Net.set_extra_state = lambda self, state: None
"""
"""Appended to the code of the model: its state has other names, and an entry that is no tensor."""


def test_nothing_is_written_for_a_source_that_does_not_fit(mlx: Mlx, folder: Path) -> None:
    for node, problem in (
        ("{source:run_009}", "cfg.transfer.net: "),
        ("{source:run_001,model:body}", "has the models net; choose one of them with model"),
        ("{source:run_001,rules:[{drop:layer.*}]}", "Did you mean 'layers.*'?"),
    ):
        refused = mlx(folder, "train", "run", f"+cfg.transfer.net={node}")
        assert (refused.returncode, problem in refused.stderr) == (1, True), refused.stderr
        assert refused.stderr.count("\n") == 1
    refused = mlx(folder, "train", "run", "+cfg.transfer.body={source:run_001}")
    assert "cfg.transfer.body: there is no model 'body'. " in refused.stderr
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
    (here / "rules.yaml").write_text('rules:\n- map: {"*": "*"}\n')
    assert mlx(here, *command[:-1], "same.safetensors").returncode == 0
    same = json.loads(mlx(here, "xp", "surgery", "run_001", "same.safetensors", "--json").stdout)
    assert {row["tensor"]: row["change"] for row in same} == dict.fromkeys(two, 0.0)
    (here / "rules.yaml").write_text('rules:\n- fresh: "layers.3.*"\n')
    refused = mlx(here, *command[:-1], "rules.yaml/other.safetensors")
    assert "rules.yaml: source, fresh, slice and pad are for cfg.transfer" in refused.stderr
    for node, problem in (
        ("rule: []", "rules.yaml: rule: mlx_runtime.sections.Transfer has no such argument."),
        (
            "_target_: os.abort",
            "rules.yaml: _target_ is 'os.abort', not allowed in cfg.transfer; remove it",
        ),
    ):
        (here / "rules.yaml").write_text(node)
        assert problem in mlx(here, *command[:-1], "other.safetensors").stderr
    (here / "rules.yaml").write_text('rules:\n- drop: "layers.3.*"\n')
    other = mlx(here, *command[:-1], "other.pt")
    assert (other.returncode, "other.pt does not end with .safetensors" in other.stderr) == (2, True)
    refused = mlx(here, *command[:-1], "rules.yaml/other.safetensors")
    assert "cannot write rules.yaml/other.safetensors: Not a directory; choose another name" in refused.stderr
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
    both = mlx(here, "train", "run", "cfg.restore_checkpoint_path=same.safetensors")
    assert "cfg.transfer and cfg.restore_checkpoint_path exclude each other" in both.stderr
