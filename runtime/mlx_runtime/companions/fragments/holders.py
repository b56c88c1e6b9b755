"""The workers that hold each tensor of a model, one in each pipeline; pipelines may be cut at different blocks."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from mlx_runtime.companions.fragments.cutting import Cut, tensors_of
from mlx_runtime.companions.fragments.links import Links, Ranks

Tensor = TypeVar("Tensor", bound=torch.Tensor)


class Holders:
    """The workers that hold each tensor of a model. Every worker must construct it, for the same models in order.

    Args:
        model: The whole model.
        cuts: Its stages, by pipeline.
        links: Connections of this worker, which create a process group for the holders of each tensor.
    """

    def __init__(self, model: nn.Module, cuts: Sequence[Cut], links: Links) -> None:
        self.model, self._cuts, self._links = model, cuts, links
        self._ranks = {name: self._ranks_of(name) for name, _ in tensors_of(model, aliases=True)}
        for ranks in self._ranks.values():
            links.add_peers(ranks)

    def of(self, name: str) -> Ranks:
        """Return the ranks that hold a tensor, by pipeline. All of them hold buffers outside of units."""
        return self._ranks[name]

    def _ranks_of(self, name: str) -> Ranks:
        pipelines, stages = self._links.pipelines, self.stages_of(name)
        if None in stages:
            return tuple(rank for ranks in pipelines for rank in ranks)
        return tuple(ranks[stage] for ranks, stage in zip(pipelines, stages, strict=True) if stage is not None)

    def stages_of(self, name: str) -> list[int | None]:
        """Return the stage of each pipeline that holds a tensor; None for a buffer outside of units."""
        return [cut.stage_of(name) for cut in self._cuts]

    def grouped(self, tensors: Mapping[str, Tensor]) -> list[tuple[Ranks, list[Tensor]]]:
        """Group tensors of this worker by holders, in an order that is the same on all workers."""
        found: dict[Ranks, list[Tensor]] = {ranks: [] for ranks in self._links.peers}
        for name, item in tensors.items():
            found[self.of(name)].append(item)
        return [(ranks, items) for ranks, items in found.items() if items]
