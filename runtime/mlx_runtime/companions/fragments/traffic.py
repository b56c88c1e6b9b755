"""Compression of what replicas send to each other, with error feedback: what one average leaves out, the next one has.

Stich et al., "Sparsified SGD with Memory" (arXiv 1809.07599), for the largest values; Vogels et al., "PowerSGD" (arXiv
1905.13727), for matrices of low rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlx_runtime.errors import MlxError

Payload = dict[str, torch.Tensor]

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

SHARE = 0.01
"""Share of the values that `topk` sends."""

RANK = 4
"""Rank of the matrices that `powersgd` sends."""

HOOKED = ("fp16", "powersgd")
"""Compressions of gradients, for which torch has hooks of DDP; it has none for `topk`."""


class Compressor:
    """Compresses vectors of this replica, and remembers what it has left out of them.

    Args:
        kind: `cfg.replicas.traffic`.
        shapes: shapes of the parameters in a vector, in order.
        exact: number of values after the parameters, which are never compressed: buffers, like running variances.
        dtype: type of the vectors.
    """

    def __init__(
        self, kind: str | None, shapes: Sequence[Sequence[int]], exact: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        self.kind, self._dtype, self._shapes = kind, dtype, [tuple(shape) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._count, self._exact = sum(self._sizes), exact
        self.rest: torch.Tensor | None = None  # left out so far
        self.bases: list[torch.Tensor] = []  # of the matrices, from the average before
        self._matrices = [index for index, shape in enumerate(self._shapes) if kind == "powersgd" and _pays(shape)]

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self.rest, "bases": list(self.bases)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rest, self.bases = state["rest"], list(state["bases"])

    def compress(self, vector: torch.Tensor) -> Payload:
        """Return the tensors to send instead of a vector. Their shapes are the same for all vectors."""
        if self.kind is None:
            return {"values": vector}
        values = vector[: self._count]
        if self.rest is not None:
            values = values + self.rest.to(values.device)
        payload = getattr(self, f"_{self.kind}")(values) | {"exact": vector[self._count :]}
        self.rest = values - self.expand(payload)[: self._count]
        return payload  # type: ignore[no-any-return]

    def expand(self, payload: Payload) -> torch.Tensor:
        """Return the vector that a payload stands for."""
        if self.kind is None:
            return payload["values"]
        exact = payload["exact"]
        if self.kind == "fp16":
            return torch.cat([payload["values"].to(exact.dtype), exact])
        if self.kind == "topk":
            values = exact.new_zeros(self._count)
            return torch.cat([values.index_copy_(0, payload["positions"].long(), payload["values"]), exact])
        sizes = [size for index, size in enumerate(self._sizes) if not self._is_matrix(index)]
        parts = list(torch.split(payload["rest"], sizes))
        for index in self._matrices:
            product = payload[f"left{index}"] @ payload[f"right{index}"].T
            parts.insert(index, product.reshape(-1))
        return torch.cat([*parts, exact])

    def problem(self, payload: Any) -> str | None:
        """Return why something that was received is not a payload of another replica, or None."""
        wanted = self.compressed_shapes()
        if not isinstance(payload, dict) or payload.keys() != wanted.keys():
            return "it does not have the tensors of this compression"
        for name, (shape, dtype) in wanted.items():
            item = payload[name]
            if not isinstance(item, torch.Tensor) or tuple(item.shape) != shape or item.dtype != dtype:
                return f"{name} is not a {str(dtype).removeprefix('torch.')} tensor of the shape {shape}"
            if dtype.is_floating_point and not item.isfinite().all():
                return f"{name} has values that are not finite"
        found = payload["positions"] if self.kind == "topk" else torch.empty(0)
        if found.numel() and (
            int(found.min()) < 0 or int(found.max()) >= self._count or len(found.unique()) < len(found)
        ):
            return "positions has values that are no positions"
        return None

    def compressed_shapes(self) -> Shapes:
        """Return the shape and type of each tensor of a payload."""
        wide = self._dtype
        exact: Shapes = {"exact": ((self._exact,), wide)}
        if self.kind is None:
            return {"values": ((self._count + self._exact,), wide)}
        if self.kind == "fp16":
            return exact | {"values": ((self._count,), torch.float16)}
        if self.kind == "topk":
            return exact | {"positions": ((self._chosen,), torch.int32), "values": ((self._chosen,), wide)}
        rest = sum(size for index, size in enumerate(self._sizes) if not self._is_matrix(index))
        found: Shapes = {"rest": ((rest,), wide)}
        for index in self._matrices:
            rows, columns = _matrix(self._shapes[index])
            found |= {f"left{index}": ((rows, RANK), wide), f"right{index}": ((columns, RANK), wide)}
        return found | exact

    @property
    def _chosen(self) -> int:
        return max(1, math.ceil(self._count * SHARE)) if self._count else 0

    def _is_matrix(self, index: int) -> bool:
        return index in self._matrices

    def _fp16(self, values: torch.Tensor) -> Payload:
        most = torch.finfo(torch.float16).max
        return {"values": values.clamp(-most, most).to(torch.float16)}

    def _topk(self, values: torch.Tensor) -> Payload:
        positions = values.abs().topk(self._chosen).indices.sort().values
        return {"positions": positions.to(torch.int32), "values": values[positions]}

    def _powersgd(self, values: torch.Tensor) -> Payload:
        parts = list(torch.split(values, self._sizes))
        payload = {
            "rest": torch.cat([item for index, item in enumerate(parts) if not self._is_matrix(index)] or [values[:0]])
        }
        first, bases = not self.bases, []
        for number, index in enumerate(self._matrices):
            matrix = parts[index].reshape(_matrix(self._shapes[index]))
            if first:  # equal on all replicas; any full rank will do
                generator = torch.Generator().manual_seed(index)
                base = torch.randn(matrix.shape[1], RANK, generator=generator).to(matrix)
            else:
                base = self.bases[number].to(matrix)
            left = torch.linalg.qr(matrix @ base).Q
            right = matrix.T @ left
            payload |= {f"left{index}": left, f"right{index}": right}
            bases.append(right if bool(right.any()) else base)
        self.bases = bases
        return payload


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _pays(shape: tuple[int, ...]) -> bool:
    """Return True if a matrix is larger than its two factors."""
    if len(shape) < 2 or not math.prod(shape):
        return False
    rows, columns = _matrix(shape)
    return min(rows, columns) > RANK and RANK * (rows + columns) < rows * columns


def compressed_gradients(traffic: str) -> Callable[..., nn.Module]:
    """Return a constructor of DDP wrappers that compress the gradients of every step, by the hooks of torch."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def replicate(model: nn.Module, **options: Any) -> nn.Module:
        wrapped = DistributedDataParallel(model, **options)
        if traffic == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif traffic == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=10)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            raise MlxError(f"torch has no hook of DDP for {traffic}")
        return wrapped

    return replicate
