"""The content of checkpoints: saving and restoring an experiment."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from mlx_runtime import companions
from mlx_runtime.data.loaders import Loader
from mlx_runtime.data.sampling import mix_seeds
from mlx_runtime.distributed import randomness
from mlx_runtime.distributed.collectives import broadcast, gather
from mlx_runtime.distributed.wrapping import is_sharded
from mlx_runtime.errors import MlxError
from mlx_runtime.events import CheckpointSaved
from mlx_runtime.loop.context import RunContext, is_per_worker
from mlx_runtime.loop.optimization import Optimization
from mlx_runtime.loop.reporting import Reporter
from mlx_runtime.runs.checkpoints import store
from mlx_runtime.runs.checkpoints.groups import (
    DamagedError,
    State,
    copy_to_cpu,
    load_into,
    members,
    merge_ranks,
    on_device,
    state_of,
    tensors,
)
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import BackgroundSaver
from mlx_runtime.storage.redaction import hidden_texts, unredact

SAVED_ONCE = ("models", "optimizers", "tools", "own")
"""Groups saved from rank 0; `own` contains the objects that `worker_loop` assigns to the experiment itself."""

SAVED_PER_RANK = ("metrics", "losses")
"""Groups saved for every rank; `per_worker` contains the objects of `tools` and `own` with this attribute."""

MADE_BY_LOOP = ("tools", "own")
"""Groups to which `worker_loop` may add objects; these are restored when the first pass begins."""


class _Unfinished(NamedTuple):
    """A restored checkpoint until its first pass begins, when `resume` restores what the loop has made by then."""

    state: State  # without models
    restored: dict[str, set[str]]  # members that `restore` has restored, by groups to which the loop may have added


class Checkpointer:
    """Saves and restores an experiment. Every worker must make the same calls."""

    def __init__(self, context: RunContext, reporter: Reporter, optimization: Optimization) -> None:
        self._context, self._reporter, self._optimization = context, reporter, optimization
        self._groups, self._topology = context.groups, context.topology
        self.loaders: dict[str, Loader] = {}  # by name of the dataset
        self.positions: dict[str, Any] = {}  # positions of loaders that the loop has not used since the restore
        self.requested = False  # a checkpoint is saved as soon as the current update is complete
        self.step: int | None = None  # global step of the checkpoint saved or restored last
        self._values: dict[str, float] = {}  # numbers by which that checkpoint is ranked
        self._valued_at: tuple[int, int] | None = None  # epoch and global step of that checkpoint
        self._unfinished: _Unfinished | None = None
        self._own: set[str] | None = None  # attributes that a resumed run would restore, once a pass has begun
        self._from_sharded = False  # the checkpoint to restore has shards
        self._transferred = False  # models have the weights of `cfg.transfer`
        allowed = reporter.tracking.push_for_checkpoint if reporter.tracking is not None else lambda: None
        self._saver = BackgroundSaver(context.checkpoints, self._complete, allowed)
        if context.topology.writes:
            context.checkpoints.clean()

    # -- saving

    def check(self) -> None:
        """Raise a ConfigError before training if attributes of tools would be refused by `save`."""
        tools = self._groups.members("tools").items()
        # A state_dict may be slow, or expect that training has begun.
        state_of(SimpleNamespace(**{name: item for name, item in tools if not hasattr(item, "state_dict")}))

    def save(self, epoch: int, *, finished: bool) -> None:
        """Gather the state of all ranks, and store it in the background.

        The checkpoint is ranked only by numbers recorded since the checkpoint of an earlier step.
        """
        before, self._valued_at = self._valued_at, (epoch, self._context.progress.global_step)
        self._values = {**(self._values if before == self._valued_at else {}), **self._reporter.unsaved}
        self._reporter.unsaved = {}
        self.requested, self.step = False, self._context.progress.global_step
        self._report_late()
        writes, strategy = self._topology.writes, self._optimization.strategy
        sharded = strategy.shards or self._is_sharded()
        groups = self._group_states() if writes or sharded else {}
        if sharded:
            groups |= strategy.consolidate({name: groups[name] for name in SAVED_ONCE})
        parts = companions.part("sharding.saving").Parts() if any(map(is_sharded, tensors(groups))) else None
        of_rank: State = {"random": randomness.random_state_dict(self._topology.device)}
        for name in SAVED_PER_RANK:
            of_rank[name] = state_of(self._groups[name])[0]
        of_rank["per_worker"] = self._states("per_worker")
        if parts is not None:
            of_rank, groups = (
                {name: parts.without(part, name) for name, part in of.items()} for of in (of_rank, groups)
            )
        ranks = gather(copy_to_cpu(of_rank))  # on the CPU: rank 0 may not have their GPU
        state: State | None = None
        if writes and ranks is not None:
            state = self._state(ranks) | groups | {"epoch": epoch, "finished": finished}
        checkpoint = CheckpointInfo(epoch, finished, self._context.progress.global_step, dict(self._values))
        if parts is not None or state is not None:
            self._saver.save(state, checkpoint, parts)

    def _report_late(self) -> None:
        """Report attributes of the experiment that a resumed run would lack when it restores them."""
        if self._own is not None and (late := self._assigned() - self._own):
            names = ", ".join(f"self.{name}" for name in sorted(late))
            text = f"{names}: assigned after the first batch, and so not restored by a resumed run; assign it before"
            self._reporter.notice(text)
            self._own |= late

    def _assigned(self) -> set[str]:
        """Return the names of the objects with a state that the loop has assigned to the experiment."""
        own, made = self._groups.members("own"), vars(self._groups.experiment)
        return {name for name in own if not type(made[name]).__module__.startswith("mlx_runtime.")}

    def _group_states(self) -> State:
        """Return the states of the groups that are saved from rank 0, and entries of the strategy."""
        groups = {
            group: {name: state for name, state in self._states(group).items() if name not in self._of_workers(group)}
            for group in SAVED_ONCE
        }
        return groups | self._optimization.strategy.state_dict(groups["models"])

    def _states(self, group: str) -> State:
        """Return the states of the members of a group, and report members that cannot be part of a checkpoint."""
        context = self._context
        secrets = hidden_texts(context.config, context.shown_config)
        states, left_out = state_of(self._groups[group], secrets)
        titles = ", ".join(f"{group}.{name}".removeprefix("own.").removeprefix("per_worker.") for name in left_out)
        if titles and group in ("models", "optimizers"):
            raise MlxError(f"{titles} cannot be part of a checkpoint: only numbers, text and tensors can")
        if titles:
            self._reporter.notice(
                f"not in checkpoints: {titles}; only numbers, text and untrained tensors are, in lists and dicts, too. "
                "A class with state_dict and load_state_dict chooses them, for example array.tolist()"
            )
        return states

    def _of_workers(self, group: str) -> set[str]:
        """Return the names of the members of a group whose state differs by worker."""
        return {name for name, item in self._groups.members(group).items() if is_per_worker(item)}

    def _state(self, ranks: list[Any]) -> State:
        """Return the content of a checkpoint besides groups and the epoch, given the states of each rank."""
        replicas = self._topology.replicas
        return {
            "ranks": [ranks[rank] for item in replicas for rank in item],
            "world_size": len(ranks),
            "replica_sizes": [*map(len, replicas)],
            "seed": self._context.cfg.seed,
            "global_step": self._context.progress.global_step,
            "config": dict(self._context.shown_config),
            "on_device": on_device(self._groups["tools"]),
            "loaders": self.positions | {name: loader.state_dict() for name, loader in self.loaders.items()},
            "scaler": self._optimization.state_dict(),
            **self._reporter.state_dict(),
        }

    def _complete(self, checkpoint: CheckpointInfo) -> None:
        """Report a complete checkpoint, and remove those that are not kept. Called in the background."""
        if not self._topology.writes:
            return
        saved, cfg = self._context.checkpoints, self._context.cfg
        saved.prune(cfg.keep_checkpoints, cfg.monitor, cfg.mode)
        path, step = saved.path(checkpoint), checkpoint.global_step
        event = CheckpointSaved(checkpoint.epoch, checkpoint.finished, step, path, checkpoint.metrics)
        self._reporter.send(event)
        if self._reporter.tracking is not None:
            self._reporter.tracking.trackers.handle(event)

    def wait(self) -> None:
        """Wait until the last checkpoint is stored. Raise a `StorageError` if it could not be."""
        self._saver.wait()

    def settle(self) -> None:
        """After a failure of the loop, wait until the last checkpoint is stored, and ignore errors."""
        with contextlib.suppress(MlxError):
            self.wait()

    # -- restoring

    def restore(self) -> int | None:
        """Restore the latest checkpoint, or else the one in `cfg`; see `BaseModule.restore_checkpoint`."""
        found = self._find()
        if found is None:
            if self._context.cfg.transfer and not self._transferred:
                self._transferred = True  # the loop may call `restore_checkpoint`, too
                companions.part("surgery.transferring").transfer(self._context, self._reporter)
            return None
        state, prepared = found
        context, progress = self._context, self._context.progress
        regrouped = self._regrouped_by_loop(state)
        for name in SAVED_ONCE:
            others = {*state[name], *self._groups.members(name)} - regrouped if name == "optimizers" else None
            self._load(name, prepared, only=others)
        restored = {name: set(self._groups.members(name)) for name in (*MADE_BY_LOOP, "optimizers")}
        restored["optimizers"] -= regrouped
        self._set_group_values(state)
        self._load_per_worker(prepared, self._groups.members("per_worker"))
        self._load_rank(prepared, metrics=True)
        self._optimization.load_state_dict(state["scaler"])
        self._optimization.strategy.load_state_dict(state)
        self._reporter.restore(state)
        self.step = progress.global_step = state["global_step"]
        context.cfg.start_epoch = progress.epoch = state["epoch"] + state["finished"]
        self.positions = dict(state["loaders"])
        for name in self.loaders.keys() & self.positions.keys():
            self.loaders[name].load_state_dict(self.positions[name])
        rest = {name: part for name, part in state.items() if name != "models"}
        self._unfinished = _Unfinished(rest, restored)
        if context.evaluates:
            context.cfg.start_epoch = state["epoch"] + 1  # also if that epoch had not ended
            progress.epoch, progress.epochs = state["epoch"], 0
            self._unfinished, self.positions = None, {}
            self._reporter.forget()
        elif 0 < context.cfg.num_epochs <= context.cfg.start_epoch:  # 0: the training function decides
            epochs = f"{context.cfg.start_epoch} of {context.cfg.num_epochs}"
            self._reporter.notice(f"already at epoch {epochs}; raise cfg.num_epochs to train further")
        return int(state["epoch"])

    def resume(self, loader: str | None) -> None:
        """Restore objects that `worker_loop` created or changed before its first pass, as if it had not been
        interrupted.

        It may have created a scheduler, drawn random numbers, and reset the metrics. The reset is right before a whole
        pass, and is undone before the rest of an interrupted one. An evaluation before the interrupted pass restores
        nothing. `loader` is the name of the loader whose pass begins; None for the first update of a loop that reads
        none, which begins an interrupted epoch again, and may have drawn random numbers since the restore.
        """
        if self._own is None:
            self._own = self._assigned()
        if self._unfinished is None:
            return
        state, restored = self._unfinished
        begun = {name for name, position in state["loaders"].items() if position.get("steps")}
        if not (state["finished"] or loader in begun or (loader is None and not begun)):
            return
        within = loader is not None and not state["finished"]
        self._unfinished = None
        wanted = {name: set(self._groups.members(name)) - done for name, done in restored.items()}
        new = wanted["own"] | {f"tools.{item}" for item in wanted["tools"]}
        if any(wanted.values()):
            wanted["optimizers"] = set(self._groups.members("optimizers"))  # a new scheduler has changed them
        prepared = self._prepare(state, wanted)
        for name, names in wanted.items():
            self._load(name, prepared, only=names & set(state[name]))
        if wanted["optimizers"]:
            self._set_group_values(state)
        for name in MADE_BY_LOOP:
            for missing in sorted(set(state[name]) - set(self._groups.members(name))):
                title = f"{'self' if name == 'own' else name}.{missing}"
                self._reporter.notice(f"{title} is not restored: assign it before the first batch")
        if loader is not None:
            self._load_rank(prepared, metrics=within)
        elif not state["finished"]:
            self._reporter.notice(
                f"epoch {state['epoch'] + 1} is repeated from its beginning, after the updates of its interrupted part"
            )
        self._load_per_worker(prepared, self._groups.members("per_worker") if within else new)
        if within:
            self._reporter.states |= state["numbers"]["states"]
        self._context.progress.interrupted = within

    def check_resumed(self) -> None:
        """Raise an MlxError if objects that the loop has made are not restored, because nothing has called `resume`."""
        if self._unfinished is None:
            return
        made = {
            f"{group}.{name}".replace("own.", "self.")
            for group, names in self._unfinished.restored.items()
            for name in set(self._groups.members(group)) - names
            if name in self._unfinished.state[group]
        }
        if made:
            raise MlxError(
                f"the loop saved {', '.join(sorted(made))} without restoring the state in the checkpoint; call "
                "self.restore_checkpoint() after the loop has made all of its objects"
            )

    def _regrouped_by_loop(self, state: State) -> set[str]:
        """Return the optimizers that had other parameter groups at save time, without those of sharded models."""
        if self._is_sharded():
            return set()
        optimizers = self._groups.members("optimizers")
        return {
            name
            for name, saved in state["optimizers"].items()
            if name in optimizers
            and len(saved.get("param_groups", ())) != len(getattr(optimizers[name], "param_groups", ()))
        }

    def _find(self) -> tuple[State, State] | None:
        """Return the state to restore, as saved and as prepared for loading, or None if there is no checkpoint."""
        saved, path = self._context.checkpoints, self._context.cfg.restore_checkpoint_path
        notice = self._reporter.notice
        while True:
            newest = saved.newest(notice) if self._topology.writes else None
            fields = broadcast(None if newest is None else asdict(newest[0]))
            if fields is None:
                break
            latest = CheckpointInfo(**fields)
            state = self._read(partial(saved.load, latest, whole=False), newest and newest[1])
            self._from_sharded = state["sharded"]
            try:
                prepared = self._prepare(state, dict.fromkeys(SAVED_ONCE))
            except DamagedError as error:
                saved.reject(latest, str(error))
                continue
            self._reporter.rewind(state)
            self._values, self._valued_at = dict(latest.metrics), (latest.epoch, latest.global_step)
            notice(f"restored  {saved.path(latest)} (epoch {state['epoch'] + 1}, step {state['global_step']})")
            return state, prepared
        if not path:
            return None
        state = self._read(partial(store.read, path, whole=False))
        self._from_sharded = state["sharded"]
        notice(f"restored  {path} (epoch {state['epoch'] + 1}, step {state['global_step']})")
        return state, self._prepare(state, dict.fromkeys(SAVED_ONCE))

    def _read(self, read: Callable[[], State], known: State | None = None) -> State:
        """Return a state that all read, unless it is known, or that rank 0 sends if only it sees the storage."""
        shares = self._context.shares_storage
        state = known or (read() if shares or self._topology.writes else {})
        return state if shares else cast(State, broadcast(state))

    def _prepare(self, state: State, wanted: Mapping[str, Collection[str] | None]) -> State:
        """Return a state in the form that members of groups, None for all, load: each worker reads what it holds."""
        if not self._is_sharded():
            return state
        models, whole = self._groups.members("models"), not self._from_sharded
        layouts = companions.part("sharding.layouts").Layouts(models, whole=whole)
        return cast(State, layouts.of_state(state, wanted, self._groups))

    def _is_sharded(self) -> bool:
        """Return True if the checkpoint to restore, or the run, is sharded; then a prepared state is a copy."""
        # FSDP may have gathered the parameters of a model.
        parts = (part for model in self._groups.modules for part in (*model.modules(), *model.parameters()))
        return self._from_sharded or any(map(is_sharded, parts))

    def _configs(self, state: State) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the config of a checkpoint, with secrets that are known here, and the config of the run."""
        return unredact(state["config"], self._context.shown_config, self._context.config), self._context.config

    def _load(self, name: str, state: State, *, only: set[str] | None = None) -> None:
        """Restore the members of a group; tools get the settings that the config has changed."""
        present, device = self._groups.members(name), self._topology.device
        saved = {
            item: self._with_settings(state, f"{name}.{item}".removeprefix("per_worker."), part)
            for item, part in state[name].items()
        }
        moved = {key if name == "tools" else f"tools.{key}": device for key in state["on_device"]}
        of_workers = self._of_workers(name) if name != "per_worker" else set()
        only = ({*present, *saved} if only is None else only) - of_workers
        group, owned = self._groups[name], self._is_sharded()
        for text in load_into(group, saved, name, only=only, moved=moved, owned=owned):
            self._reporter.notice(text.removeprefix("per_worker."))

    def _with_settings(self, state: State, key: str, part: State) -> State:
        """Return the state of an object, with the settings that the config has changed if it is a tool."""
        group, _, name = key.partition(".")
        if group != "tools":
            return part
        from mlx_runtime.loop.resuming import with_settings

        before, now = (config.get("tools") or {} for config in self._configs(state))
        return with_settings(part, before.get(name), now.get(name), key)

    def _load_per_worker(self, state: State, names: Collection[str]) -> None:
        """Restore the objects whose state differs by worker, unless the workers of each replica have changed."""
        topology, only = self._topology, {*names} & set(self._groups.members("per_worker"))
        if self._has_sizes_of(state):
            own = states_by_replica(state)[topology.data_parallel_rank][topology.model_parallel_rank]
            self._load("per_worker", state | {"per_worker": own["per_worker"]}, only=only)
            return
        what = "sizes of the replicas have" if state["world_size"] == topology.world_size else "number of workers has"
        for name in sorted(only):
            self._reporter.notice(f"{name} starts over: each worker had its own state, and the {what} changed")

    def _has_sizes_of(self, state: State) -> bool:
        """Return True if a checkpoint was saved by the same numbers of workers in each replica."""
        return bool([*map(len, self._topology.replicas)] == state["replica_sizes"])

    def _set_group_values(self, state: State) -> None:
        """Apply changed values of the config to optimizers, and to schedulers."""
        before, now = (config.get("optimizers") for config in self._configs(state))
        kept = [item for name in MADE_BY_LOOP for item in self._groups.members(name).values()]
        from mlx_runtime.loop.resuming import set_group_values

        set_group_values(self._groups.optimizers, kept, before, now)

    def _load_rank(self, state: State, *, metrics: bool) -> None:
        """Restore random numbers and, if `metrics`, metrics of this rank; after a change of size, mergeable ones."""
        topology, before = self._topology, states_by_replica(state)
        number, position = topology.data_parallel_rank, topology.model_parallel_rank
        if self._has_sizes_of(state):
            randomness.load_random_state_dict(before[number][position]["random"], topology.device)
        else:
            randomness.set_seed(mix_seeds(state["seed"], number, state["global_step"]))
        of_replicas = [ranks[position % len(ranks)] for ranks in before]
        mine = of_replicas[number :: topology.data_parallel_size]
        for name in SAVED_PER_RANK if metrics and mine else ():  # otherwise, there are more replicas than at save time
            saved, group = mine[0][name], self._groups[name]
            if topology.data_parallel_size < len(of_replicas):
                saved = merge_ranks([part[name] for part in mine], group)
                for item in sorted(set(members(group)) & set(of_replicas[0][name]) - set(saved)):
                    text = f"{name}.{item} starts over: its states of several workers cannot be merged"
                    self._reporter.notice(text)
            load_into(group, saved, name, only=set(saved))


def states_by_replica(state: State) -> list[list[State]]:
    """Return the states of the workers of each replica."""
    ranks = iter(state["ranks"])
    return [[next(ranks) for _ in range(count)] for count in state["replica_sizes"]]
