"""Schedules that own the backward pass train like one process, with the same models as gpipe."""

import gc
import json
import os
import random
import re
import shutil
import tempfile
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import groups
import pytest
import test_pipeline as pipelines
import torch
from conftest import ROOT, Mlx, bind
from forkserver import Commands
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

import mlx_runtime
from mlx_runtime import open_run
from mlx_runtime.companions.fragments.schedules import split
from mlx_runtime.distributed.collectives import mean_of
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.loop.options import strategy_class, strategy_problems
from mlx_runtime.loop.strategies import strategy_of
from mlx_runtime.sections import Fragments

pytestmark = pytest.mark.local

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
}

IGNORED = 11


class Deep(pipelines.Transformer):
    """Six blocks; a weight of the first stage is also used by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(pipelines.Block(6) for _ in range(6))


class Noisy(nn.Sequential):
    """Dropout, batch normalization, views and in-place operations at the cuts."""

    def __init__(self) -> None:
        layers = [
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.2)) for _ in range(5)
        ]
        super().__init__(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x.t().contiguous().t())
        return x


class Backwards(Deep):
    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        x = self.embed(tokens)
        for block in reversed(self.blocks):  # type: ignore[call-overload]  # torch has not annotated it
            x, _ = block(x)
        return {"logits": self.head(x)}


class Frozen(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)
        self.positions.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.head.weight = nn.Parameter(torch.ones(12, 6))


class Towers(nn.Module):
    """Two chains side by side. On four stages, the second one holds the end of one and the beginning of the other.

    A weight of the second stage is also used by the last one. The third stage changes what it receives in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.second[4].weight = self.first[2].weight
        self.second[1] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = []
        for tower in (self.first, self.second):
            made = x
            for block in tower:
                made = block(made).sin()
            ends.append(made)
        return ends[0] + ends[1]


class Drawing(pipelines.Drawing):
    seen: list[float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is not None and type(x) is torch.Tensor:
            self.seen.append(float(torch.rand(())))
        return super().forward(x)


class Flagged(nn.Sequential):
    """Sends another tensor if asked to."""

    def __init__(self) -> None:
        super().__init__(*(Drawing(4, 4) for _ in range(2)))

    def forward(self, x: torch.Tensor, kind: str = "") -> torch.Tensor:
        first = self[0](x)
        other = first.sin()
        made: torch.Tensor = self[1](first)
        return made + other if kind == "residual" else made


class Failing(nn.Module):
    """The first stage fails one microbatch later, so that the other has what it waits for."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            self.calls -= 1
            if self.calls < 0:
                raise ZeroDivisionError("mine") from KeyError("before")
        made: torch.Tensor = self.layer(x)
        return made


class Wrong(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Failing(), Failing(0))


class Step:
    """Training steps of a model, as `BaseModule.forward_backward` takes them."""

    def __init__(self, made: Any, model: nn.Module, **metrics: Any) -> None:
        self.made, self.model, self.metrics = made, model, metrics

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        loss = mean_loss(self.model, batch)
        if "loss" in self.metrics:
            self.metrics["loss"].update(loss.detach(), weight=len(batch["x"]))
        return loss, None

    def counted(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        loss = mean_loss(self.model, batch, ignore_index=IGNORED)
        return loss, (batch["y"] != IGNORED).sum().double()

    def halved(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return half_loss(self.model, batch), None

    def __call__(self, rows: torch.Tensor, loss: Any = None, factor: float = 1.0, scale: Any = None) -> float:
        found = self.made.schedule.step(
            loss or self.loss,
            {"x": rows, "y": rows.roll(1, 1), "ids": [*range(len(rows))]},
            scale=torch.ones(()) if scale is None else scale,
            factor=lambda weight: factor if weight is None else weight / mean_of(weight),
            metrics=self.metrics,
        )
        return float(found)


def mean_loss(model: nn.Module, batch: Any, **options: Any) -> torch.Tensor:
    assert len(batch.get("ids", batch["x"])) == len(batch["x"])
    return cross_entropy(model(batch["x"])["logits"].flatten(0, 1), batch["y"].flatten(), **options)


def half_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return mean_loss(model, batch).half()


def scaled(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """Return a scaler with which the first step overflows, and no other one."""
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**60, "backoff_factor": 2.0**-48})
    return scaler


def built(rank: int, model: Any, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    checkpointing = settings.pop("checkpointing", False)
    cfg = mlx_runtime.TrainConfig(
        strategy="pipeline", fragments=Fragments(**settings), activation_checkpointing=checkpointing
    )
    size = torch.distributed.get_world_size()
    made = strategy_of(cfg, Topology(rank, size, torch.device("cpu"), rank, settings.get("stages", size)), None)
    node = {"_target_": f"{__name__}.Models", "net": {"_target_": f"{__name__}.{model.__name__}"}}
    return made, made.build(node).net


class Models(pipelines.Models):
    pass


def alone(optimizer: str, rows: torch.Tensor, **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Train in one process."""
    torch.manual_seed(0)
    model = Deep()
    opt = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(3):
        opt.zero_grad()
        loss = mean_loss(model, {"x": rows, "y": rows.roll(1, 1)}, **options)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return model.state_dict(), float(loss.detach())


def alone_in_half(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Deep()
    opt, scaler = OPTIMIZERS["sgd"](model.parameters()), scaled(torch.amp.GradScaler("cpu"))
    for _ in range(4):
        opt.zero_grad()
        scaler.scale(half_loss(model, {"x": rows, "y": rows.roll(1, 1)})).backward()
        scaler.step(opt)
        scaler.update()
    return model.state_dict()


def trained_in_half(rank: int, rows: torch.Tensor, kind: str, microbatches: int) -> Any:
    made, model = built(rank, Deep, schedule=kind, microbatches=microbatches)
    opt, scaler, step = OPTIMIZERS["sgd"](model.parameters()), scaled(made.scaler(enabled=True)), Step(made, model)
    for _ in range(4):
        opt.zero_grad()
        step(rows, step.halved, scale=scaler.scale(torch.ones(())))
        scaler.step(opt)
        scaler.update()
    return whole(made, model), scaler.get_scale()


def trained(rank: int, optimizer: str, rows: torch.Tensor, kind: str, *, counted: bool = False, **more: Any) -> Any:
    made, model = built(rank, Deep, schedule=kind, microbatches=4, **more)
    step = Step(made, model)
    opt = OPTIMIZERS[optimizer](model.parameters())
    made.prepare_optimizers({"opt": opt})
    for _ in range(3):
        opt.zero_grad()
        loss = step(rows, step.counted if counted else None)
        made.clip_grad_norm_(list(model.parameters()), 0.5)
        opt.step()
    return whole(made, model), loss


def whole(made: Any, model: nn.Module) -> Any:
    return made.consolidate({"models": {"net": dict(model.state_dict())}, "optimizers": {}})["models"]["net"]


def on_two(rank: int) -> Any:
    """Weights and losses by schedule and optimizer."""
    rows = pipelines.tokens(8)
    return {
        ("1f1b", "sgd"): trained(rank, "sgd", rows, "1f1b"),
        ("1f1b", "short"): trained(rank, "sgd", rows[:7], "1f1b"),
        ("interleaved", "adamw"): trained(rank, "adamw", rows, "interleaved"),
        ("interleaved", "counted"): trained(rank, "sgd", rows, "interleaved", counted=True),
        ("zero_bubble", "sgd"): trained(rank, "sgd", rows, "zero_bubble"),
        ("zero_bubble", "bf16"): trained(rank, "sgd", rows, "zero_bubble", chunks=1, traffic="bf16"),
    }


def in_half(rank: int) -> Any:
    rows, kinds = pipelines.tokens(8), (("1f1b", 4), ("zero_bubble", 1))
    return {kind: trained_in_half(rank, rows, kind, microbatches) for kind, microbatches in kinds}


def others(rank: int) -> Any:
    """Recomputation, metrics, and errors."""
    found: dict[str, Any] = {}
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for kind, checkpointing in (("1f1b", False), ("1f1b", True), ("gpipe", False)):
        made, model = built(rank, Noisy, schedule=kind, microbatches=4, chunks=1, checkpointing=checkpointing)
        model.train()

        def squared(batch: Any, model: nn.Module = model) -> Any:
            return model(batch["x"]).square().mean(), None

        found.setdefault("draws", []).append(float(torch.rand(())))
        if kind == "gpipe":
            squared({"x": inputs})[0].backward()
        else:
            options: Any = {"scale": torch.ones(()), "factor": lambda weight: 1.0, "metrics": {}}
            made.schedule.step(squared, {"x": inputs}, **options)
        gradients = {name: item.grad for name, item in model.named_parameters() if not item.is_meta}
        buffers = {name: item for name, item in model.named_buffers() if not item.is_meta}
        found[f"{kind} {checkpointing}"] = gradients | buffers
    found["draws"].append(float(torch.rand(())))
    made, model = built(rank, Deep, schedule="interleaved", microbatches=4)
    metric, rows = MeanMetric(), pipelines.tokens(8)
    found["loss"] = [Step(made, model, loss=metric)(rows) for _ in range(2)]
    found["metric"] = float(metric.compute())
    model.eval()
    with torch.no_grad():
        found["evaluated"] = float(mean_loss(model, {"x": rows, "y": rows.roll(1, 1)}))
    step = Step(made, model, loss=metric)
    noise = torch.zeros(8, 4, requires_grad=True)
    found["errors"] = {
        "early": error_of(lambda: step(rows, lambda batch: (metric.update(1.0), step.loss(batch))[1])),
        "none": error_of(lambda: step(rows, lambda batch: (torch.zeros(()), None))),
    }
    curve = BinaryAUROC()

    def curved(batch: Any, step: Step = Step(made, model, curve=curve)) -> Any:
        loss = step.loss(batch)
        curve.update(torch.rand(4), torch.tensor([0, 1, 0, 1]))
        return loss

    found["errors"]["rows"] = error_of(lambda: Step(made, model, curve=curve)(rows, curved))
    found["errors"]["native"] = error_of(lambda: mean_loss(model.train(), {"x": rows, "y": rows}).backward())
    made, model = built(rank, Noisy, schedule="1f1b", microbatches=4)
    found["errors"]["input"] = error_of(
        lambda model=model: Step(made, model)(rows, lambda batch: (model(noise), None))  # type: ignore[misc]
    )
    for name, kind, schedule in (("order", Backwards, "1f1b"), ("frozen", Frozen, "zero_bubble")):
        made, model = built(rank, kind, schedule=schedule, microbatches=4)
        found["errors"][name] = error_of(lambda step=Step(made, model): step(rows))  # type: ignore[misc]
    for schedule in ("1f1b", "interleaved", "zero_bubble"):
        made, model = built(rank, Deep, schedule=schedule, microbatches=4)
        step = Step(made, model)

        def twice(batch: Any, step: Step = step) -> Any:
            return step.loss(batch)[0] + step.loss(batch)[0], None

        found["errors"][f"twice {schedule}"] = error_of(lambda step=step, twice=twice: step(rows, twice))  # type: ignore[misc]
    found["errors"]["few"] = error_of(lambda: built(rank, Deep, schedule="interleaved", chunks=5))
    return found


def squared_step(made: Any, loss: Any, inputs: torch.Tensor, **more: Any) -> float:
    options: Any = {"scale": torch.ones(()), "factor": lambda weight: 1.0, "metrics": {}}
    return float(made.schedule.step(loss, {"x": inputs, **more}, **options))


def single(model: type[nn.Module], inputs: torch.Tensor) -> dict[str, Any]:
    """Return the gradients in one process."""
    torch.manual_seed(0)
    whole = model()
    whole(inputs).square().mean().backward()
    return {name: param.grad for name, param in whole.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: item.grad for name, item in model.named_parameters() if not item.is_meta}


def corners(rank: int) -> Any:
    """Models and losses with which schedules have gone wrong."""
    found: dict[str, Any] = {}
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    made, model = built(rank, Towers, schedule="zero_bubble", microbatches=4)
    squared_step(made, lambda batch: (model(batch["x"]).square().mean(), None), inputs)
    found["towers"] = gradients(model), single(Towers, inputs)
    model.zero_grad()
    drawn: dict[str, list[float]] = {"loss": [], "block": []}

    def drawing(batch: Any) -> Any:
        drawn["loss"].append(float(torch.rand(())))
        batch["x"] = batch["x"] + 1
        return model(batch["x"]).square().mean() + batch["x"].mean(), None

    found["changed"] = squared_step(made, drawing, inputs), squared_step(made, drawing, inputs + 1)
    changing = error_of(lambda: squared_step(made, lambda batch: drawing({"x": batch["x"].add_(1)}), inputs.clone()))
    found["error"] = changing
    for kind in ("1f1b", "gpipe"):
        made, model = built(rank, Flagged, schedule=kind, microbatches=4)
        model[rank].seen = drawn["block"]
        for name in ("", "residual", ""):

            def flagged(batch: Any, model: nn.Module = model, name: str = name) -> Any:
                return model(batch["x"], name).square().mean(), None

            model.zero_grad()
            random.seed(0)
            if kind == "gpipe":
                flagged({"x": inputs})[0].backward()
            else:
                squared_step(made, flagged, inputs)
            found.setdefault(f"flags {kind}", []).append((gradients(model), random.random()))
    found["drawn"] = drawn
    made, model = built(rank, Towers, schedule="1f1b", microbatches=2)
    gc.disable()
    passes = []
    for rows in (2, 4, 6):
        squared_step(made, lambda batch: (model(batch["x"]).mean(), None), inputs[:rows])
        passes.append(weakref.ref([*made.schedule.passes.values()][-1]))
    found["kept"] = [item() is not None for item in passes]
    gc.enable()
    with tempfile.TemporaryDirectory() as folder:
        ends = [{"node": f"node_{number}", "first": number, "last": number} for number in range(2)]
        content = {"model": "net", "blocks": ["0", "1"], "clusters": [{"stages": ends}]}
        (plan := Path(folder, "plan.json")).write_text(json.dumps(content))
        settings = {"schedule": "1f1b", "microbatches": 1, "plan": str(plan)}
        found["planned"] = error_of(lambda: built(rank, Flagged, **settings))
        placed = [{"node": "b", "first": 0, "last": 0}, {"node": "a", "first": 1, "last": 1}]
        plan.write_text(json.dumps({**content, "clusters": [{"stages": placed}]}))
        os.environ["MLX_NODE"] = "ab"[rank]
        for kind in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            made, model = built(rank, Flagged, schedule=kind, microbatches=2, plan=str(plan), chunks=1)
            if kind == "gpipe":
                model(inputs).square().mean().backward()
            else:
                squared_step(made, lambda batch, net=model: (net(batch["x"]).square().mean(), None), inputs)
            found[f"placed {kind}"] = made.topology.replicas, gradients(model)
        del os.environ["MLX_NODE"]
    made, model = built(rank, Wrong, schedule="1f1b", microbatches=4)
    try:
        squared_step(made, lambda batch: (model(batch["x"]).square().mean(), None), inputs)
    except Exception as error:
        found["failed"] = repr(error), repr(error.__cause__), traceback.format_exception(error)
    return found


def sent(rank: int) -> Any:
    """What is recorded about a training step with 8 rows, by schedule and traffic."""
    found = {}
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for kind, traffic in SENT:
        made, model = built(rank, Noisy, schedule=kind, microbatches=4, traffic=traffic)
        recorded: list[dict[str, float]] = []
        session = SimpleNamespace(
            step_done=lambda number: None,
            passes=SimpleNamespace(latest=None),
            progress=SimpleNamespace(epoch=0),
            optimization=SimpleNamespace(accumulation=SimpleNamespace(last=True)),
            metrics=SimpleNamespace(is_due=lambda item: True),
            reporter=SimpleNamespace(record=lambda values, *_, to=recorded: to.append(values)),
        )
        made.observe(session)
        for number in range(2):
            with torch.no_grad():
                model(inputs)  # does not count
            if kind == "gpipe":
                model(inputs).square().mean().backward()
            else:
                squared_step(made, lambda batch, net=model: (net(batch["x"]).square().mean(), None), inputs)
            session.step_done(number)
        found[kind, traffic] = recorded
    return found


SENT = {
    ("gpipe", None): 4 * 4,
    ("gpipe", "fp16"): 4 * 2,
    ("1f1b", "bf16"): 4 * 2,
    ("interleaved", None): 4 * 4,
}
"""Bytes of a row of `Noisy` between two stages, by schedule and traffic."""


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except MlxError as error:
        return str(error)
    return ""


def on_four(rank: int) -> Any:
    """Two pipelines of two stages, whose updates have two steps."""
    found = {}
    for kind in ("1f1b", "interleaved"):
        made, model = built(rank, Deep, stages=2, schedule=kind, microbatches=2)
        step, rows = Step(made, model), pipelines.tokens(8).chunk(2)[rank // 2]
        opt = OPTIMIZERS["sgd"](model.parameters())
        for _ in range(2):
            opt.zero_grad()
            for last in (False, True):
                made.sync_gradients([model], last)
                step(rows.roll(int(last), 0)[: 4 - last], factor=0.5)  # the second one is not divided evenly
            opt.step()
        found[kind] = whole(made, model)
    return found


@pytest.fixture(scope="module")
def on_workers(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    works: dict[str, groups.Work] = {"on_two": on_two, "in_half": in_half, "others": others, "corners": corners}
    works |= {"sent": sent, "on_four": on_four}
    sizes = {name: 2 for name in works if name != "on_four"}
    return groups.on_workers(commands, works, tmp_path_factory.mktemp("workers"), 4, sizes)


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> bool:
    assert found.keys() == wanted.keys()
    return all(torch.allclose(found[name], item, rtol=0, atol=tolerance) for name, item in wanted.items())


def test_schedules_train_like_one_process(on_workers: dict[str, list[Any]]) -> None:
    """With momentum and AdamW, clipped; with a short batch, and a loss that is a mean over some targets."""
    first, second = on_workers["on_two"]
    rows = pipelines.tokens(8)
    cases = {
        "sgd": (alone("sgd", rows), 1e-6),
        "adamw": (alone("adamw", rows), 1e-5),
        "counted": (alone("sgd", rows, ignore_index=IGNORED), 1e-6),
        "short": (alone("sgd", rows[:7]), 1e-6),
        "bf16": (alone("sgd", rows), 1e-2),
    }
    for (kind, name), (found, loss) in first.items():
        (weights, wanted), tolerance = cases[name]
        assert close(found, weights, tolerance), (kind, name)
        assert loss == pytest.approx(wanted, abs=10 * tolerance)
        assert loss == second[kind, name][1]
    assert not close(first["zero_bubble", "bf16"][0], cases["sgd"][0][0], 1e-7)  # it was rounded


def test_scaled_gradients_are_those_of_one_process(on_workers: dict[str, list[Any]]) -> None:
    """In fp16, all stages skip the step that overflows."""
    wanted, (first, second) = alone_in_half(pipelines.tokens(8)), on_workers["in_half"]
    for kind, (found, scale) in first.items():
        assert close(found, wanted, 1e-2), kind
        assert scale == second[kind][1] == 2.0**12


def test_gradients_are_averaged_over_pipelines_and_steps(on_workers: dict[str, list[Any]]) -> None:
    torch.manual_seed(0)
    model = Deep()
    opt = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(2):
        opt.zero_grad()
        for part in pipelines.tokens(8).chunk(2):
            for last in (False, True):
                rows = part.roll(int(last), 0)[: 4 - last]
                (mean_loss(model, {"x": rows, "y": rows.roll(1, 1)}) / 4).backward()
        opt.step()
    for kind, found in on_workers["on_four"][0].items():
        assert close(found, model.state_dict(), 1e-6), kind


def test_stages_draw_recompute_and_normalize_as_with_gpipe(on_workers: dict[str, list[Any]]) -> None:
    first, second = on_workers["others"]
    assert first["draws"] == second["draws"]
    for found in (first, second):
        wanted = found["gpipe False"]
        assert {"running_mean", "weight"} <= {name.rpartition(".")[2] for name in wanted}
        for name in ("1f1b False", "1f1b True"):
            assert close(found[name], wanted, 1e-6), name


def test_metrics_and_losses_are_those_of_the_last_stage(on_workers: dict[str, list[Any]]) -> None:
    for found in on_workers["others"]:
        assert found["loss"][0] == found["loss"][1] == pytest.approx(found["metric"], abs=1e-6)
        assert found["evaluated"] == pytest.approx(found["metric"], abs=1e-6)


def test_what_a_schedule_cannot_train_is_refused(on_workers: dict[str, list[Any]]) -> None:
    for found in on_workers["others"]:
        errors = found["errors"]
        assert errors["early"].startswith("self.loss updates loss before it calls the model")
        assert errors["none"].startswith("self.loss(batch) does not call a model")
        assert errors["native"].startswith(
            "cfg.fragments.schedule=interleaved trains with self.forward_backward(batch)"
        )
        assert errors["input"].startswith("an input of models.net needs gradients")
        assert "goes back from stage 1 to stage 0" in errors["order"]
        assert "models.net cannot be cut into 10 stages: it has 8 blocks" in errors["few"]
        assert errors["frozen"].startswith("no input of stage 1 of models.net needs gradients")


def test_errors_of_the_loss_end_all_stages(on_workers: dict[str, list[Any]]) -> None:
    """Only the last one knows them; the others would wait for the next gradient."""
    for found in on_workers["others"]:
        errors = found["errors"]
        assert errors["rows"].startswith("self.loss updates curve, which keeps every row")
        for schedule in ("1f1b", "interleaved", "zero_bubble"):
            assert errors[f"twice {schedule}"] == (
                f"self.loss(batch) calls models.net after models.net; with cfg.fragments.schedule={schedule}, it calls "
                "one model once: set it to gpipe"
            )


def test_all_gradients_are_found(on_workers: dict[str, list[Any]]) -> None:
    for found in on_workers["corners"]:
        own, wanted = found["towers"]
        assert own
        assert close(own, {name: wanted[name] for name in own}, 1e-6)


def test_a_loss_is_called_twice_with_the_same_part_and_numbers(on_workers: dict[str, list[Any]]) -> None:
    torch.manual_seed(0)
    model, inputs = Towers(), torch.randn(8, 4, generator=torch.Generator().manual_seed(1)) + 1
    with torch.no_grad():
        wanted = [float(model(x).square().mean() + x.mean()) for x in (inputs, inputs + 1)]
    for found in on_workers["corners"]:
        assert found["changed"] == pytest.approx(wanted, abs=1e-6)
        assert found["error"].startswith("self.loss changes a tensor of its batch in place before it calls the model")
        assert not {*found["drawn"]["loss"]} & {*found["drawn"]["block"]}


def test_arguments_that_are_not_tensors_count(on_workers: dict[str, list[Any]]) -> None:
    for found in on_workers["corners"]:
        for (own, _), (other, _) in zip(found["flags 1f1b"], found["flags gpipe"], strict=True):
            assert close(own, other, 1e-6)
        (first, drawn), _, (third, again) = found["flags gpipe"]
        assert drawn == again
        assert close(first, third, 1e-7)


def test_microbatches_are_checked_with_a_plan(on_workers: dict[str, list[Any]]) -> None:
    for found in on_workers["corners"]:
        assert found["planned"].startswith("cfg.fragments.schedule=1f1b needs at least as many microbatches as stages")


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zero_bubble"])
def test_the_first_stage_may_be_on_the_last_worker(on_workers: dict[str, list[Any]], kind: str) -> None:
    for found in on_workers["corners"]:
        (replicas, own), (_, expected) = found[f"placed {kind}"], found["placed gpipe"]
        assert replicas == ((1, 0),)
        assert len(own) == 2
        assert close(own, expected, 1e-6)


def test_buffers_of_earlier_batches_are_released(on_workers: dict[str, list[Any]]) -> None:
    for found in on_workers["corners"]:
        assert found["kept"] == [False, True, True]


def test_what_stages_send_is_recorded(on_workers: dict[str, list[Any]]) -> None:
    """Activations and gradients cross one cut, or three; the last stage also sends outputs, or losses by a schedule."""
    (first, second), rows = on_workers["sent"], 8
    for (kind, traffic), size in SENT.items():
        recorded, message = first[kind, traffic], 4 * 8
        assert not second[kind, traffic]
        cuts = 1 if kind in ("gpipe", "1f1b") else 3
        each = [cuts * rows * size, cuts * rows * size + (rows * 4 * 4 if kind == "gpipe" else message)]
        wanted = {"fragments/bytes": sum(each)} | {f"fragments/bytes/rank_{rank}": each[rank] for rank in range(2)}
        assert recorded[1] == wanted, (kind, traffic)
        assert recorded[0].keys() == wanted.keys()


def test_an_error_is_that_of_the_model(on_workers: dict[str, list[Any]]) -> None:
    for found in on_workers["corners"]:
        error, cause, text = found["failed"]
        assert (error, cause) == ("ZeroDivisionError('mine')", "KeyError('before')")
        assert any("test_schedules.py" in line and "in forward" in line for line in text)


@pytest.mark.pure
def test_settings_that_are_refused() -> None:
    cfg = mlx_runtime.TrainConfig
    planned = cfg(strategy="pipeline", fragments=Fragments(schedule="interleaved", plan="plan.json", stages=2))
    twice = cfg(strategy="pipeline", fragments=Fragments(schedule="zero_bubble"), activation_checkpointing=True)
    assert "cfg.fragments.schedule=zero_bubble goes back through blocks twice" in strategy_problems(twice)[0]
    assert strategy_problems(planned)[0].endswith(
        "has 2 stages per worker, and a plan has one; set cfg.fragments.chunks=1"
    )
    for schedule, microbatches, text in (
        ("1f1b", 3, "needs at least as many microbatches as stages; set cfg.fragments.microbatches=4"),
        ("interleaved", 9, "runs 9 microbatches in 2 rounds, which must divide them; set cfg.fragments.microbatches=8"),
        ("zero_bubble", 9, "runs 9 microbatches in 2 rounds"),
    ):
        wrong = cfg(strategy="pipeline", fragments=Fragments(schedule=schedule, microbatches=microbatches))
        with pytest.raises(ConfigError, match=re.escape(text)):
            strategy_class("pipeline").model_parallel_size(wrong, 4)


@pytest.mark.pure
def test_batches_are_split_with_their_lists() -> None:
    batch = {"x": torch.arange(4), "names": [*"abcd"], "scale": torch.ones(()), "other": [1, 2]}
    first, second = split(batch, 2)
    assert (first["names"], second["names"], second["other"]) == (["a", "b"], ["c", "d"], [1, 2])
    assert second["x"].tolist() == [2, 3]
    assert split(batch, 3) == []


@pytest.fixture
def sorter(mlx: Mlx, baked: Path, tmp_path: Path) -> Path:
    """An experiment that trains docs/examples/sorter.py."""
    folder = Path(shutil.copytree(baked, tmp_path / "sorter"))
    shutil.copy(ROOT / "docs" / "examples" / "sorter.py", folder / "src" / "experiment.py")
    return bind(mlx, folder)


def test_an_error_of_one_stage_ends_the_run_with_its_line(mlx: Mlx, sorter: Path) -> None:
    """The other stage, which loses its connection, does not hide it."""
    file, line = sorter / "src" / "experiment.py", "        return x + self.mlp("
    fail = 'if type(x) is torch.Tensor and torch.distributed.get_rank() == 1:\n            raise KeyError("mine")\n'
    file.write_text(file.read_text().replace(line, f"        {fail}{line}"))
    done = mlx(sorter, "train", "run", "cfg.fragments.schedule=1f1b")
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: ") :]
    assert error.startswith("error: KeyError: 'mine' (raised on rank 1)\n  src/experiment.py:")
    assert error.endswith(' in forward\n    raise KeyError("mine")\n')


@pytest.mark.examples
def test_a_run_resumes_bit_for_bit(mlx: Mlx, sorter: Path) -> None:
    """In fp16, with updates of two steps, a clipped norm, and metrics of the last stage.

    With gpipe, it sends as much as a plan predicts.
    """
    fixed = ("cfg.accumulate_grad_batches=2", "cfg.precision=fp16", "cfg.debug.limit_batches=8")
    schedule = ("cfg.fragments.schedule=zero_bubble", "cfg.checkpoint_every_steps=2")
    for words in (
        ("cfg.name=straight", "cfg.max_steps=4", *schedule),
        ("cfg.name=resumed", "cfg.max_steps=2", *schedule),
        ("cfg.name=resumed", "cfg.max_steps=4", "--resume=run_001", *schedule),
        ("cfg.name=gpipe", "cfg.max_steps=4"),
    ):
        done = mlx(sorter, "train", "run", *fixed, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [open_run(sorter / "runs" / name / "run_001") for name in ("straight", "resumed", "gpipe")]
    straight, resumed, gpipe = (run.state()["models"]["net"] for run in runs)
    assert all(torch.equal(resumed[name], item) for name, item in straight.items())
    # AdamW also moves weights whose gradients are only rounding errors, like biases of keys, so not all are close.
    assert all(float((gpipe[name] - item).abs().mean()) < 3e-3 for name, item in straight.items())
    losses = [run.record["metrics"]["train/loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1]) == pytest.approx(losses[2], abs=1e-2)
    done = mlx(sorter, "train", "clusterize", "cfg.precision=fp16")
    assert done.returncode == 0, done.stdout + done.stderr
    costs = json.loads((sorter / "src" / "fragments.json").read_text())["costs"]
    last_of_first_stage = costs[2]
    sent = runs[2].metrics()["fragments/bytes"].dropna()
    outputs = costs[-1]["sends"] / 2  # in a plan, they are float32
    assert [*sent] == [2 * (last_of_first_stage["sends"] + last_of_first_stage["returns"] + outputs)]
