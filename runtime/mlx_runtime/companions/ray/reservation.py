"""Resources that Ray reserves for the workers of a run, before they start: placement groups."""

import contextlib
import time
import uuid
from collections.abc import Mapping
from typing import Any

import ray
import ray.util
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PREFIX = "mlx:"
"""Beginning of the names of placement groups, `mlx:digits/run_001:<unique>`."""


class Reservation:
    """Resources for `least` workers, reserved at once, and then for more of them, `step` by `step`, up to `most`.

    Ray queues the requests of all jobs; for those that wait, an autoscaler starts nodes. `title` names the run, and
    `each` are the resources of a worker.
    """

    def __init__(self, title: str, each: Mapping[str, float], least: int, most: int, step: int) -> None:
        self._name = f"{PREFIX}{title}:{uuid.uuid4().hex}"
        self._each, self._steps, self._step = dict(each), (most - least) // step, step
        self._groups: list[Any] = []
        self._pending: dict[Any, Any] = {}  # by the reference that Ray completes
        self.since: float | None = None  # when the first workers got room
        self._request(least, "")

    @property
    def complete(self) -> bool:
        return self.since is not None and not self._pending

    def strategies(self) -> list[PlacementGroupSchedulingStrategy]:
        """Return how to schedule each worker for which there is room now."""
        if self._pending:
            done, _ = ray.wait([*self._pending], num_returns=len(self._pending), timeout=0)
            self._groups += [self._pending.pop(reference) for reference in done]
        if self.since is None and self._groups:
            self.since = time.monotonic()
            for number in range(self._steps):
                self._request(self._step, f"+{number}")
        return [
            PlacementGroupSchedulingStrategy(group, index)
            for group in self._groups
            for index in range(group.bundle_count)
        ]

    def is_held(self) -> bool:
        """Return False if a node has been lost on which workers would start."""
        return all(ray.util.placement_group_table(group).get("state") == "CREATED" for group in self._groups)

    def release(self) -> None:
        """Give the resources back, and kill the workers that use them."""
        for group in [*self._groups, *self._pending.values()]:
            with contextlib.suppress(Exception):  # of various types, if the cluster is gone
                remove_placement_group(group)

    def _request(self, workers: int, suffix: str) -> None:
        group = placement_group([self._each] * workers, "PACK", name=self._name + suffix)
        self._pending[group.ready()] = group
