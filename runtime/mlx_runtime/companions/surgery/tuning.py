"""Which parameters train, by `cfg.tuning`: frozen ones, learning rates, and what checkpoints contain."""

import contextlib
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mlx_runtime.companions.sharding.blocks import repeated_blocks
from mlx_runtime.companions.surgery import rules
from mlx_runtime.config.building import build_optimizers
from mlx_runtime.config.constructors.targets import path_of
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.distributed.torch_private import relearn_parameters
from mlx_runtime.distributed.wrapping import is_sharded, unwrap, whole
from mlx_runtime.errors import ConfigError, suggest
from mlx_runtime.loop.context import params_of
from mlx_runtime.runs.checkpoints.groups import FROZEN, State, members, state_of
from mlx_runtime.runs.tables import plural
from mlx_runtime.sections import Replicas, Tuning

Parameters = dict[str, nn.Parameter]


def problems(cfg: Any) -> list[str]:
    """Return one line per setting in `cfg.tuning` that has a wrong value."""
    found: list[str] = []
    if cfg.replicas != Replicas():
        found.append("cfg.tuning cannot be combined with cfg.replicas; remove one of them")
    for name, item in cfg.tuning.items():
        if not isinstance(item, Tuning):
            found.append(f"cfg.tuning.{name} is {item!r:.100}, not settings of {path_of(Tuning)}")
            continue
        values = [
            ("layer_decay", item.layer_decay, item.layer_decay is None or 0 < item.layer_decay <= 1, "(0, 1]"),
            *(("unfreeze", value, value >= 0, "0 or more") for value in item.unfreeze.values()),
            *(("learning_rates", value, 0 < value < math.inf, "above 0") for value in item.learning_rates.values()),
        ]
        found += [f"cfg.tuning.{name}.{key} is {value!r}; write {fit}" for key, value, fits, fit in values if not fits]
    return found


class Tuner:
    """What trains in a run. Every worker makes the same calls.

    The learning rate of a parameter group is `lr_scale` times that of its optimizer or, if that is 0, its own.

    Attributes:
        passes: number of complete passes that count for `unfreeze`, which checkpoints contain.

    Raises:
        ConfigError: a pattern matches nothing, two contradict each other, or there is no such model.
    """

    def __init__(self, sections: Mapping[str, Tuning], group: Any, topology: Topology) -> None:
        if topology.model_parallel_size > 1:
            raise ConfigError("cfg.tuning works with cfg.strategy=ddp and fsdp, not with pipelines")
        self.passes, self._workers, self._sections = 0, topology.world_size, sections
        until: dict[nn.Parameter, int | None] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._rates: dict[nn.Parameter, dict[str, Any]] = {}  # options of parameter groups
        self._left_out: dict[str, dict[str, str]] = {}  # SHA-256 of parameters by model and name
        self._chosen: dict[str, set[str]] = {}  # names of parameters that `freeze` and `unfreeze` match, by model
        self._checked: set[int] = set()  # identities of optimizers
        models = members(group, nn.Module)
        for name, item in self._sections.items():
            if name not in models:
                raise ConfigError(f"cfg.tuning.{name}: there is no such model.{suggest(name, models)}")
            named = dict(models[name].named_parameters(remove_duplicate=False))
            frozen = frozen_of(item, named, f"cfg.tuning.{name}")
            trained = {path: param for path, param in named.items() if frozen.get(param, 0) is not None}
            rates = rates_of(item, models[name], trained, name)
            settings: list[tuple[dict[nn.Parameter, Any], ...]] = [(until, frozen), (self._rates, rates)]
            for known, found in settings:
                if two := [param for param, value in found.items() if known.setdefault(param, value) != value]:
                    raise ConfigError(f"cfg.tuning.{name} and another section disagree about {self._names[two[0]]}")
            self._names |= {param: f"{name}.{path}" for path, param in named.items()}
            chosen = matching(named, dict.fromkeys((*item.freeze, *item.unfreeze)), name)
            self._chosen[name] = {path for path, param in named.items() if param in chosen}
            if item.save == "trained":
                kept = models[name].state_dict()
                never = sorted(named.keys() & kept.keys() - trained.keys())
                self._left_out[name] = {path: sha256_of(kept[path]) for path in never}
        for param, passes in until.items():
            param.requires_grad_(passes == 0)
        self._until = {param: passes for param, passes in until.items() if passes != 0}  # None: for the whole run

    def params_of(self, name: str, model: nn.Module) -> list[dict[str, Any]]:
        """Return the parameter groups of a model, without parameters that `cfg.tuning` freezes for the whole run."""
        groups: dict[tuple[str, int], dict[str, Any]] = {}
        for param in model.parameters():
            options, until = self._rates.get(param, {"title": name, "lr_scale": 1}), self._until.get(param, 0)
            if until is not None:
                groups.setdefault((options["title"], until), {"params": [], **options})["params"].append(param)
        return [*groups.values()]

    def optimizers(self, node: Any, models: Any) -> Any:
        """Build the optimizers of these models, and scale the learning rates of their parameter groups.

        Raises:
            ConfigError: there are no learning rates to scale.
        """
        made = build_optimizers(node, models, self.params_of)
        every = [group for optimizer in members(made, Optimizer).values() for group in optimizer.param_groups]
        scaled = {id(group): group for group in every if group.get("lr_scale", 1) not in (0, 1)}  # some share groups
        for group in scaled.values():
            if group.get("lr") is None:
                raise ConfigError("cfg.tuning.*.layer_decay scales learning rates; give each optimizer an lr")
            group["lr"] = group["lr"] * group["lr_scale"]
        return made

    # -- called by the session

    def observe(self, session: Any, stack: contextlib.ExitStack) -> None:
        """Print the table of parameter groups, and follow a session that is about to begin."""
        self._session, self._groups = session, session.context.groups
        lines, models = [], self._groups.members("models")
        for name, optimizer in self._groups.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                until = max((self._until.get(param) or 0 for param in group["params"]), default=0)
                facts = [group.get("title", "of the code"), _count(group["params"])]
                facts += [f"lr {group['lr']:g}"] if group.get("lr") is not None else []
                facts += [f"trains after pass {until}"] if until else []
                lines.append(f"{name}[{number}]: {', '.join(facts)}")
        for name in self._sections:
            never = [param for param in models[name].parameters() if self._until.get(param, 0) is None]
            left_out = "; checkpoints have only their SHA-256" if name in self._left_out else ""
            lines += [f"frozen: {name}, {_count(never)}{left_out}"] if never else []
        session.reporter.notice("tuning    " + "\n          ".join(lines))
        session.turned_to = self.turn_to
        stack.callback(register_optimizer_step_pre_hook(self._check).remove)

    def turn_to(self, number: int) -> None:
        """Begin to train the parameters that are frozen until this pass, and let their wrappers know."""
        self.passes = max(self.passes, number)
        if number < 0 and self._left_out:
            self.without_frozen(state_of(self._groups["models"])[0])  # raises an error if a checkpoint would
        due = {param for param, until in self._until.items() if until is not None and until <= self.passes}
        for param in due:
            param.requires_grad_(True)
            del self._until[param]
        for wrapper in self._wrappers():
            if not due.isdisjoint(wrapper.parameters()):
                relearn_parameters(wrapper)
        models = self._groups.members("models")
        for name in self._sections.keys() & models.keys():
            hold_statistics(unwrap(models[name]), self._chosen[name])

    def _wrappers(self) -> list[DistributedDataParallel]:
        modules = (*self._groups.modules, *self._groups.members("own").values())
        return [item for item in modules if isinstance(item, DistributedDataParallel)]

    def _check(self, optimizer: Optimizer, *_: object) -> None:
        """Check an optimizer before its first step, when the loop has wrapped the models.

        Raises:
            ConfigError: DDP would not synchronize the gradients of a parameter that trains later, or the loop has no
                passes that count.
        """
        if id(optimizer) in self._checked:
            return
        self._checked.add(id(optimizer))
        if self._session.own_steps is not None and any(self._until.values()):
            raise ConfigError("cfg.tuning.*.unfreeze counts passes over training loaders, and the loop reads none")
        wrapped = {param for wrapper in self._wrappers() for param in wrapper.parameters()}
        later = [item for item in params_of(optimizer) if self._until.get(item)]
        unknown = [self._names[item] for item in later if not (is_sharded(item) or item in wrapped)]
        if self._workers > 1 and unknown:
            raise ConfigError(
                f"{unknown[0]} trains later, and DDP would not synchronize it: wrap its model with prepare_model, "
                "which needs a parameter that trains from the start, like those of its head"
            )

    # -- checkpoints

    def without_frozen(self, states: State) -> State:
        """Return the states of models with SHA-256 instead of parameters that constructors build.

        Raises:
            ConfigError: such a parameter has changed since it was built.
        """
        found = dict(states)
        for name, left_out in self._left_out.items():
            found[name] = dict(states[name])
            for path, sha256 in left_out.items():
                if sha256_of(states[name][path]) != sha256:  # `_version` does not know of changes through `.data`
                    raise ConfigError(
                        f"models.{name}.{path} is frozen, and not as its constructor builds it, so that checkpoints "
                        f"need it; set cfg.tuning.{name}.save=all"
                    )
                found[name][path] = {FROZEN: sha256}
        return found


def filled(saved: State, own: Mapping[str, Any]) -> State:
    """Return the saved state of a model with its `own` frozen parameters, which the checkpoint lacks.

    Raises:
        ValueError: they differ from those of the run that saved it.
    """
    missing = [name for name, item in saved.items() if isinstance(item, dict) and item.keys() == {FROZEN}]
    for name in missing:
        if name not in own or sha256_of(own[name]) != saved[name][FROZEN]:
            raise ValueError(
                f"{name} was frozen and is not in the checkpoint, and its constructor now builds another; restore the "
                "code, arguments and cfg.tuning of the run that saved it"
            )
    return saved | {name: own[name] for name in missing}


def sha256_of(tensor: torch.Tensor) -> str:
    """Return a checksum of the type, shape and content of a tensor; for a sharded one, every worker must call this."""
    held = whole(tensor).detach().cpu().contiguous()
    found = hashlib.sha256(f"{held.dtype} {[*held.shape]} ".encode())
    found.update(held.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def frozen_of(item: Tuning, named: Parameters, key: str) -> dict[nn.Parameter, int | None]:
    """Return the frozen parameters of a model, with the number of passes after which they train; None for never."""
    found: dict[nn.Parameter, int | None] = {param: None for param in named.values() if not param.requires_grad}
    found |= dict.fromkeys(matching(named, dict.fromkeys(item.freeze), f"{key}.freeze"))
    frozen = {path: param for path, param in named.items() if param in found and param.is_floating_point()}
    matches = matching(frozen, item.unfreeze, f"{key}.unfreeze", "frozen parameter")
    return found | {param: item.unfreeze[pattern] for param, pattern in matches.items()}


def rates_of(item: Tuning, model: nn.Module, trained: Parameters, name: str) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the learning rates of the parameters of a model that train at some time."""
    key, rates, found = f"cfg.tuning.{name}", item.learning_rates, dict[nn.Parameter, dict[str, Any]]()
    if item.layer_decay is not None:
        depths = depths_of(model)
        if len(layers := sorted({*depths.values()})) < 2:
            raise ConfigError(f"{key}.layer_decay needs two layers or more; {name} has {len(layers)}")
        for param in trained.values():
            title, above = f"{name} layer {depths[param]} of {layers[-1]}", layers[-1] - depths[param]
            found[param] = {"title": title, "lr_scale": item.layer_decay**above}
    matches = matching(trained, rates, f"{key}.learning_rates", "parameter that trains").items()
    return found | {
        param: {"title": f"{name} {pattern}", "lr_scale": 0, "lr": rates[pattern]} for param, pattern in matches
    }


def depths_of(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the numbers of the layers of a model by parameter, in the order in which they are registered.

    Layers from 1 are the blocks that repeat in a `ModuleList` or `Sequential` or, in a model without any, its children.
    What comes before the first one is layer 0, and what comes after the last one is another layer. A model with a
    single child, like those of peft, has the layers of that child.
    """
    blocks = repeated_blocks(model) or [name for name, child in model.named_children() if [*child.parameters()]]
    if len(blocks) == 1 and all(path.startswith(f"{blocks[0]}.") for path, _ in model.named_parameters()):
        return depths_of(model.get_submodule(blocks[0]))
    depth, found = 0, {}
    for path, param in model.named_parameters():
        inside = next((number for number, block in enumerate(blocks, 1) if path.startswith(f"{block}.")), None)
        depth = inside or (len(blocks) + 1 if depth >= len(blocks) else depth)
        found[param] = depth
    return found


def matching(
    named: Parameters, patterns: Mapping[str, Any], key: str, what: str = "parameter"
) -> dict[nn.Parameter, str]:
    """Return the first pattern that each parameter matches.

    Raises:
        ConfigError: a pattern matches nothing, or a parameter matches two with different values.
    """
    found: dict[nn.Parameter, str] = {}
    for pattern, value in patterns.items():
        for path in rules.match(pattern, named, f"{key}: {pattern!r} matches no {what}", "print(model)"):
            if patterns[other := found.setdefault(named[path], pattern)] != value:
                raise ConfigError(f"{key} has two values for {path}: {other!r} and {pattern!r} match it")
    return found


def hold_statistics(model: nn.Module, chosen: Collection[str]) -> None:
    """Keep modules with running statistics in eval mode while all parameters around them are chosen, and frozen.

    Those without parameters, such as BatchNorm with `affine=False`, belong to the nearest module that has some.
    Parameters are chosen by name, because FSDP replaces them while it has gathered a module.
    """
    for path, module in model.named_modules():
        if not any(name.startswith("running_") for name, _ in module.named_buffers(recurse=False)):
            continue
        while not (params := dict(model.get_submodule(path).named_parameters(prefix=path))) and path:
            path = path.rpartition(".")[0]
        holds = bool(params) and all(name in chosen and not param.requires_grad for name, param in params.items())
        if holds and "train" not in vars(module):
            module.train = partial(_stay_in_eval, module)  # can be pickled
            module.eval()
        elif not holds and "train" in vars(module):
            del module.train
            module.train(model.training)


def _stay_in_eval(self: nn.Module, mode: bool = True) -> nn.Module:
    """Take the place of `train` of a module whose running statistics are frozen."""
    type(self).train(self, mode)
    self.training = False
    return self


def _count(params: Sequence[nn.Parameter]) -> str:
    return f"{plural(len(params), 'tensor')}, {sum(item.numel() for item in params):,} parameters"
