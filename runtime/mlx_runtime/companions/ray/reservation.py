"""Resources that Ray reserves for the workers of a run, before they start: placement groups."""

import contextlib
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
import ray.util
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PREFIX = "mlx:"
"""Beginning of the names of placement groups, `mlx:digits/run_001:<unique>`."""

MORE = "+"
"""End of the names of those that a run may do without."""

STUCK_S = 20.0
"""Minimum time for which a run holds resources for fewer workers than it needs."""


class Reservation:
    """Resources for `least` workers, reserved at once, and then for more of them, `step` by `step`, up to `most`.

    Ray queues the requests of all jobs; for those that wait, an autoscaler starts nodes. `title` names the run, and
    `each` are the resources of a worker, and `places` the label selectors of the nodes of all, or empty: any `least` of
    them will do then. With `spread` and without places, the first workers are on as many nodes as possible.
    """

    def __init__(
        self,
        title: str,
        each: Mapping[str, float],
        least: int,
        most: int,
        step: int,
        places: Sequence[dict[str, str]] = (),
        *,
        spread: bool = False,
    ) -> None:
        self._name = f"{PREFIX}{title}:{uuid.uuid4().hex}"
        self._each, self._steps, self._step = dict(each), (most - least) // step, step
        self._groups: list[Any] = []
        self._pending: dict[Any, Any] = {}  # by the reference that Ray completes
        self.since: float | None = None  # when the first workers got room
        self._places, self._strategy = [*places], "SPREAD" if spread and not places else "PACK"
        self._least, self._requested_at = least, time.monotonic()
        if places and self._steps:
            self._steps = 0
            for number in range(most // step):
                self._request(step, f"{number}{MORE if (number + 1) * step > least else ''}")
        else:
            self._request(least, "")

    @property
    def complete(self) -> bool:
        return self.since is not None and not self._pending

    def strategies(self) -> list[PlacementGroupSchedulingStrategy]:
        """Return how to schedule each worker for which there is room now."""
        if self._pending:
            done, _ = ray.wait([*self._pending], num_returns=len(self._pending), timeout=0)
            self._groups += [self._pending.pop(reference) for reference in done]
        if self.since is None and sum(group.bundle_count for group in self._groups) < self._least:
            return []
        if self.since is None:
            self.since = time.monotonic()
            for number in range(self._steps):
                self._request(self._step, f"{number}{MORE}")
        return [
            PlacementGroupSchedulingStrategy(group, index)
            for group in self._groups
            for index in range(group.bundle_count)
        ]

    def is_held(self) -> bool:
        """Return False if a node has been lost on which workers would start."""
        return all(ray.util.placement_group_table(group).get("state") == "CREATED" for group in self._groups)

    def is_stuck(self) -> bool:
        """Return True if too few workers have had room for a while. Runs that hold what others need must release it."""
        waited_s = time.monotonic() - self._requested_at
        return bool(self._groups) and self.since is None and waited_s > STUCK_S * random.uniform(1, 4)

    def release(self) -> None:
        """Give the resources back, and kill the workers that use them."""
        for group in [*self._groups, *self._pending.values()]:
            with contextlib.suppress(Exception):  # of various types, if the cluster is gone
                remove_placement_group(group)

    def _request(self, workers: int, suffix: str) -> None:
        places, self._places = self._places[:workers], self._places[workers:]
        group = placement_group(
            [self._each] * workers, self._strategy, name=self._name + suffix, bundle_label_selector=places or None
        )
        self._pending[group.ready()] = group


def needed_by_runs() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield title, state (PENDING, CREATED, …) and resources of each placement group that its run cannot do without.

    Those of other programs are `another job`.
    """
    for facts in ray.util.placement_group_table().values():
        total: dict[str, float] = {}
        for bundle in facts["bundles"].values():
            total |= {key: total.get(key, 0) + amount for key, amount in bundle.items()}
        name = facts["name"]
        if facts["state"] == "CREATED" or not name.endswith(MORE):
            title = name.removeprefix(PREFIX).rpartition(":")[0] if name.startswith(PREFIX) else "another job"
            yield title, facts["state"], total
