"""Plain functions as losses."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torchmetrics import Metric

from mlx_runtime.errors import MlxError


class Mean(Metric):
    """A loss function whose value for an epoch is the mean over all rows of all workers.

        losses: cross_entropy = Mean(F.cross_entropy, label_smoothing=0.1)

    Calling it returns the loss of the batch, for `self.backward`, and adds the batch to the mean; `update` only adds
    it. The length of the function's first argument is the number of rows. With `ignore_index`, all other targets are
    counted instead, in the mean and for `self.backward`; a batch without any has the loss 0.

    Args:
        function: function that returns the mean loss of a batch (), like those of `torch.nn.functional`.
        ignore_index: label of the targets to ignore; also passed to the function, whose second argument is the targets.
        reduction: `sum` for a function that returns the sum over a batch, which is divided by the number of rows or
            other elements, for `self.backward` as well; also passed to the function if it takes this argument.
        options: further keyword arguments of the function.

    Attributes:
        calls: Calls with gradients since the last `self.backward`.
        counted: Number of elements in the mean of the last of these calls; None if they are rows.

    Raises:
        MlxError: the function cannot be called, or is known to have another reduction.
    """

    is_differentiable = True
    higher_is_better = False
    full_state_update = False

    total: torch.Tensor
    elements: torch.Tensor

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        ignore_index: int | None = None,
        reduction: str = "mean",
        **options: Any,
    ) -> None:
        super().__init__()
        if not callable(function):
            raise MlxError(f"losses.Mean takes a function, like F.cross_entropy, not {function!r}")
        try:
            accepted = inspect.signature(function).parameters.get("reduction")
        except (TypeError, ValueError):  # a builtin without a signature
            accepted = None
        found = getattr(function, "reduction", None) if accepted is None else accepted.default
        if reduction not in ("mean", "sum"):
            raise MlxError(f"losses.Mean takes reduction='mean' or 'sum', not {reduction!r}")
        if accepted is not None and (reduction == "sum" or found == "none"):
            options["reduction"] = found = reduction
        if found in ("mean", "sum", "none") and found != reduction:
            raise MlxError(
                f"the function has reduction={found!r}, and losses.Mean {reduction!r}; give both the same reduction"
            )
        self.function, self.ignore_index, self.reduction = function, ignore_index, reduction
        self.options = options if ignore_index is None else {"ignore_index": ignore_index, **options}
        self._found: tuple[torch.Tensor, Any] | None = None  # value and elements, which `forward` knows already
        self.calls = 0
        self.counted: float | torch.Tensor | None = None
        self._before: tuple[torch.Tensor, bool, int] | None = None  # value, has a gradient, rows; of the last batch
        self.grows = False  # with the number of rows, as a sum does
        self._growth: list[torch.Tensor] | None = []  # by how much values fell less than rows, in short batches
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("elements", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def forward(self, *args: Any, count: float | torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """Return the loss of a batch, and add it to the mean.

        Args:
            args: arguments of the function.
            count: number of elements in the mean, if they are neither rows nor targets; for example, the sum of the
                weights.
            options: more keyword arguments of the function.

        Returns:
            The value of the function, () float32.
        """
        value, elements = self._mean(args, count, options)
        self._found = value.detach(), elements
        try:
            self.update(*args, **options)
        finally:
            self._found = None
        if value.requires_grad:
            self.calls += 1
            self.counted = elements if count is not None or self.ignore_index is not None else self.counted
        return value

    def update(self, *args: Any, count: float | torch.Tensor | None = None, **options: Any) -> None:
        """Add a batch to the mean; see `forward`."""
        value, elements = self._found or self._mean(args, count, options)
        self.total = self.total + value.double() * elements
        self.elements = self.elements + elements

    def compute(self) -> torch.Tensor:
        """Return the mean, () float32."""
        return (self.total / self.elements).float()

    def _watch_growth(self, value: torch.Tensor, rows: int) -> None:
        """Set `grows` if the value has fallen with the number of rows in three short batches, as a sum does."""
        before, self._before = self._before, (value.detach(), value.requires_grad, rows)
        if self._growth is None or before is None or before[1] != value.requires_grad or not 0 < 2 * rows <= before[2]:
            return
        self._growth.append(value.detach() / before[0] * before[2] / rows)
        if len(self._growth) == 3:
            found, self._growth = torch.stack(self._growth).tolist(), None
            self.grows = 0.7 < sorted(found)[1] < 1.4

    def _mean(
        self, args: tuple[Any, ...], count: float | torch.Tensor | None, options: dict[str, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Return the loss of a batch, and the number of elements in its mean."""
        value = self.function(*args, **self.options, **options)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise MlxError(
                f"losses.Mean takes a function that returns the mean of a batch; this one returned {found:.80}"
            )
        value = value.reshape(())
        if count is None and self.ignore_index is None:
            rows = len(args[0] if args else next(iter(options.values())))
            if self.reduction == "sum":
                return value / rows, rows
            if self._growth is not None:
                self._watch_growth(value, rows)
            return value, rows
        if count is None:
            target = args[1] if len(args) > 1 else options["target"]
            count = (target != self.ignore_index).sum()
        elements = torch.as_tensor(count, device=value.device).detach().reshape(())
        if self.reduction == "sum":
            value = value / elements.masked_fill(elements == 0, 1)
        return value.masked_fill(elements == 0, 0.0), elements
