"""The current pass of the training loop, and the pass to which metrics belong. Without torch, and without side effects.

A pass begins with the first batch of a loader. It ends after its last batch, when the loop leaves it, or when another
pass of its kind over the same dataset begins. The rules:

    A pass over a training dataset trains, and its steps are counted, unless it begins within `with self.stage(name)`
    or `with self.evaluation()`.

    If a step reads several training loaders, the one that is read first leads and gives the pass its name; when it runs
    out and the loop continues, the next one takes over.

    A loader that is iterated within a step, and does not train, is a separate pass until the next step; an evaluation
    loader that was iterated before the step is read alongside.

A training pass whose iterator is no longer read also ends when the loop resets the metrics or saves a checkpoint, and
then reads another training loader.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Pass:
    """One run through a dataset."""

    name: str  # first part of the names of its records, like `val` in `val/accuracy`
    training: bool  # its steps count as global steps
    dataset: str | None = None  # name of the dataset; None for data that the runtime does not know
    loader: Any = None  # yields the batches; None for data that the runtime does not know
    part: Any = None  # the rows of this worker, and its position in them
    steps: int = 0  # total number of batches; 0 if unknown
    accumulate: int = 1  # steps per update
    step: int = 0  # number of the last batch, from 1, including those before an interruption
    active: bool = True  # until the pass ends
    recorded: bool = False  # its final metrics are recorded
    closed: bool = False  # the loop reset the metrics or saved a checkpoint since the last batch
    beside: set[str] = field(default_factory=set)  # names of the datasets read alongside it
    started: float = field(default_factory=time.monotonic)

    @property
    def finished(self) -> bool:
        return self.loader is not None and self.step == self.steps

    @property
    def updates_left(self) -> int:
        return math.ceil((self.steps - self.step) / self.accumulate)


@dataclass
class Scope:
    """The passes within one `with self.stage(name)` or `with self.evaluation()`, or in the loop outside of these."""

    name: str | None = None  # name of all passes in the scope; None for the names of their datasets
    stack: list[Pass] = field(default_factory=list)  # active passes, each begun within a step of the previous one
    latest: Pass | None = None  # the last one that led
    unknown: Pass | None = None  # the pass over data that the runtime does not know


class PassTracker:
    """Applies the rules of this module to passes over datasets, identified by their names."""

    def __init__(self, *, training: bool = True) -> None:
        self._training = training  # False for `eval_loop`
        self._scopes = [Scope()]
        self._outside: dict[str, Pass | None] = {}  # the pass that led when a loader was iterated, by dataset
        self._latest: dict[tuple[str, bool], Pass] = {}  # by dataset, and whether they train

    # -- the current pass

    @property
    def trains(self) -> bool:
        """True if a pass over a training dataset that begins now trains."""
        return self._training and len(self._scopes) == 1

    @property
    def leading(self) -> Pass | None:
        """The pass that leads, or None between two passes."""
        return next(reversed(self._scopes[-1].stack), None)

    @property
    def latest(self) -> Pass | None:
        """The pass that leads or, between passes, the last one that led."""
        found = (next(reversed(item.stack), item.latest or item.unknown) for item in reversed(self._scopes))
        return next((item for item in found if item is not None), None)

    @property
    def training(self) -> Pass | None:
        """The training pass with batches left, to be resumed from a checkpoint saved now."""
        item = self.around
        return None if item is None or item.finished else item

    @property
    def around(self) -> Pass | None:
        """The training pass, even in its last step; an evaluation may be nested in it."""
        return next((item for item in self._scopes[0].stack if item.training), None)

    def in_training_step(self, *, otherwise: bool) -> bool:
        """Return True within a training step, but not within an evaluation in it; `otherwise` is for no known pass."""
        item = self.leading or self._scopes[-1].unknown
        return otherwise if item is None else item.training

    def leads(self, item: Pass) -> bool:
        """Return True if a pass leads, or will lead again when the pass that began within its step ends."""
        return any(item in scope.stack for scope in self._scopes)

    # -- events of the loop

    def iterate(self, dataset: str) -> None:
        """`iter(loader)` was called."""
        self._outside[dataset] = self.leading

    def begin(self, dataset: str, *, training: bool, **known: Any) -> Pass:
        """Begin a pass: the first batch of a loader is about to be read. `known` are other attributes of the pass."""
        made = Pass(self._scopes[-1].name or dataset, training and self.trains, dataset, **known)
        outside = self._outside.pop(dataset, None)
        for kind in {False, made.training}:  # a training pass continues after an evaluation within it
            before = self._latest.get((dataset, kind))
            if before is not None:
                self.end(before)
                outside = None if outside is before else outside
        self._latest[dataset, made.training] = made
        self._insert(made, within_step=outside is not None)
        return made

    def _insert(self, made: Pass, *, within_step: bool) -> None:
        """Decide whether a pass leads or is read alongside the leading one."""
        stack, dataset, trainer = self._scopes[-1].stack, made.dataset, self.around
        assert dataset is not None
        if made.training and trainer is not None:
            if trainer.closed and dataset not in trainer.beside:
                for item in stack[stack.index(trainer) :]:
                    self.end(item)
                stack.append(made)
        elif not stack or within_step:
            stack.append(made)
        elif made.training:  # it was listed after an evaluation set
            stack[-1] = made
        if made not in stack and stack:
            stack[-1].beside.add(dataset)

    def batch(self, found: Pass, number: int) -> bool:
        """Count a batch by its number in its pass, from 1. Return True if the pass leads."""
        found.step, found.closed = number, False
        scope = self._scopes[-1]
        before = None if scope.stack else scope.latest
        if before is not None and not before.closed and found.training and found.dataset in before.beside:
            scope.stack.append(found)  # the leading one has run out
        for scope in self._scopes:
            if found in scope.stack:
                del scope.stack[scope.stack.index(found) + 1 :]
                scope.latest = found
                return True
        return False

    def end(self, item: Pass) -> None:
        """End a pass that was read completely, that the loop has left, or whose loader is iterated again."""
        item.active = False
        for scope in self._scopes:
            if item in scope.stack:
                scope.stack.remove(item)

    def close(self) -> None:
        """The loop has reset the metrics or saved a checkpoint."""
        scope = self._scopes[-1]
        for item in scope.stack:
            item.closed = True
        if scope.latest is not None and not scope.latest.active:
            scope.latest.recorded = scope.latest.closed = True

    def step_on_own_data(self) -> None:
        """A step begins on data that the runtime does not know, so what is saved next is not of the pass before it."""
        self._scopes[-1].latest = None

    @contextmanager
    def scope(self, name: str | None) -> Iterator[Scope]:
        """Give the same name to all passes that begin within the scope. None of them trains.

        Without a name, as in an evaluation, the name is that of the scope around it, and what is saved after the scope
        may belong to its last pass.
        """
        around = self._scopes[-1]
        self._scopes.append(Scope(name or around.name))
        try:
            yield self._scopes[-1]
        finally:
            scope = self._scopes.pop()
            for item in scope.stack:
                item.active = False
            if name is None and scope.latest is not None:
                around.latest = scope.latest

    # -- records

    def to_record(self, name: str | None, *, evaluation: bool) -> Pass:
        """Return the pass to which metrics saved now belong.

        It is the leading one; between passes, the previous one or, if that is already recorded, a pass over data that
        the runtime does not know. `name` is the name that user code gives it, if any; `evaluation` is True if its steps
        are then not training steps.
        """
        scope = self._scopes[-1]
        current = self.leading
        if current is None and scope.latest is not None and not scope.latest.recorded:
            current = scope.latest if name in (None, scope.latest.name) else None
        if current is not None and not (evaluation and current.training and name != current.name):
            current.name = name or current.name
            return current
        title = name or scope.name or (scope.latest.name if scope.latest is not None else "train")
        if scope.unknown is None or scope.unknown.recorded or scope.unknown.name != title:
            after = scope.latest is not None and scope.latest.name == title
            scope.unknown = Pass(title, training=self.trains and not evaluation and not after)
        return scope.unknown
