"""The search and the pruner of a sweep, with Optuna.

Values and decisions depend only on the seed and the history, so that a resumed sweep continues like an uninterrupted
one.
"""

import math
import zlib
from typing import Any

from mlx_runtime.companions.sweeps.space import Dimension, Space, Values

REDUCTION = 3
"""ASHA continues one in this many trials at each rung: after a ninth and after a third of the epochs."""

TRIES = 20
"""Number of repeated values from the sampler after which the next untried point of the grid is used."""


class Study:
    """The search and the scheduler of one sweep.

    Args:
        space: search space.
        search: `grid` in the order of the overrides, `random`, or `optuna` for its tree-structured Parzen estimator.
        scheduler: `none`, or `asha` for asynchronous successive halving.
        mode: `max` or `min`.
        seed: seed of the samplers.
        epochs: number of epochs of a whole trial.
    """

    def __init__(self, space: Space, *, search: str, scheduler: str, mode: str, seed: int, epochs: int) -> None:
        self._space, self._search, self._seed, self._epochs = space, search, seed, epochs
        self._tried: set[frozenset[tuple[str, str]]] = set()
        self._untried = filter(lambda values: frozenset(values.items()) not in self._tried, space.grid())
        self._trials: dict[int, Any] = {}  # Optuna's, by number
        self._decisions: dict[int, tuple[int, bool]] = {}  # latest epoch of each trial, and whether it prunes
        self._study: Any = None
        if uses_optuna(search, scheduler):
            self._study = _optuna_study(mode, scheduler, epochs)
            self._distributions = {item.key: _distribution(item) for item in space.dimensions}

    def add(self, number: int, values: Values) -> None:
        """Add an existing trial."""
        self._tried.add(frozenset(values.items()))
        if self._study is None:
            return
        self._study.enqueue_trial({item.key: _parameter(item, values[item.key]) for item in self._space.dimensions})
        self._trials[number] = self._study.ask(self._distributions)

    def ask(self, number: int) -> Values | None:
        """Return the values of the next trial; None if all points of a finite space were tried."""
        values: Values | None = None
        if self._search != "grid":
            for attempt in range(TRIES):
                values = self._sample(f"{self._seed} {number} {attempt}")
                if self._space.size is None or frozenset(values.items()) not in self._tried:
                    break
            else:
                values = None
        if values is None:
            values = next(self._untried, None)
        if values is not None:
            self.add(number, values)
        return values

    def report(self, number: int, epoch: int, value: float) -> bool:
        """Receive the metric of a trial after an epoch, from 0. Return True if the trial should end now."""
        latest, prune = self._decisions.get(number, (-1, False))
        if self._study is None or epoch < latest:
            return False
        if epoch > latest:
            trial, step = self._trials[number], epoch + 1
            trial.report(value if math.isfinite(value) else math.nan, step)  # Optuna prunes NaN
            prune = step < self._epochs and trial.should_prune()
            self._decisions[number] = epoch, prune
        return prune

    def tell(self, number: int, status: str, value: float | None) -> None:
        """Receive the outcome of a trial: SUCCEEDED, PRUNED or FAILED, and its score."""
        if self._study is None:
            return
        from optuna.trial import TrialState

        trial = self._trials[number]
        if status == "SUCCEEDED" and value is not None and math.isfinite(value):
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=TrialState.PRUNED if status == "PRUNED" else TrialState.FAIL)

    def _sample(self, salt: str) -> Values:
        """Return values from the sampler, as a function of the salt and the history."""
        import optuna

        seed, adding = zlib.crc32(salt.encode()), self._study.sampler
        sampler = optuna.samplers.TPESampler if self._search == "optuna" else optuna.samplers.RandomSampler
        self._study.sampler = sampler(seed=seed)
        trial = self._study.ask(self._distributions)
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # `add` adds it, because overrides round its values
        self._study.sampler, parameters = adding, trial.params
        return {item.key: _text(item, parameters[item.key]) for item in self._space.dimensions}


def uses_optuna(search: str, scheduler: str) -> bool:
    """Return False if a sweep only runs the points of its grid in order."""
    return search != "grid" or scheduler != "none"


def _optuna_study(mode: str, scheduler: str, epochs: int) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner: Any = optuna.pruners.NopPruner()
    if scheduler == "asha":
        first = max(1, math.ceil(epochs / REDUCTION**2))
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=REDUCTION)
    direction = optuna.study.StudyDirection.MAXIMIZE if mode == "max" else optuna.study.StudyDirection.MINIMIZE
    return optuna.create_study(direction=direction, sampler=optuna.samplers.RandomSampler(), pruner=pruner)


def _distribution(dimension: Dimension) -> Any:
    """Return Optuna's distribution of the values; choices are numbered."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:
        count = len(dimension.choices)
        return IntDistribution(0, count - 1) if _ordered(dimension.choices) else CategoricalDistribution(range(count))
    if dimension.integer:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _ordered(choices: tuple[str, ...]) -> bool:
    """Return True for increasing or decreasing numbers, which the search may interpolate."""
    try:
        numbers = [float(text) for text in choices]
    except ValueError:
        return False
    return numbers in (sorted(numbers), sorted(numbers, reverse=True))


def _parameter(dimension: Dimension, text: str) -> float:
    """Return Optuna's representation of a value."""
    if dimension.choices:
        return dimension.choices.index(text)
    return int(float(text)) if dimension.integer else float(text)


def _text(dimension: Dimension, parameter: Any) -> str:
    return dimension.choices[parameter] if dimension.choices else dimension.format(parameter)
