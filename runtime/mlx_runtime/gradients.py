"""How gradients flow: norms by layer every so many steps, a picture of them per epoch, and a look for NaN and infinity.

A layer is a module with parameters of its own; it is named after its model and its place there, like `net.layers.0`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mlx_runtime.errors import MlxError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Gradients:
    """Looks at gradients just before an optimizer takes its step.

    Args:
        every: steps between two looks at all layers; 0 means never.
        stop_on_nan: whether each step is looked at, and one that is not finite ends the run.
        report: takes norms by name; None on workers that do not write.
        tell: takes a line about a layer whose gradient is not finite.
    """

    def __init__(
        self,
        every: int = 0,
        stop_on_nan: bool = False,
        report: Callable[[dict[str, float]], None] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._every, self._stop = every, stop_on_nan
        self._report, self._tell = report, tell
        self._told = self._no_matplotlib = False
        self._flow: dict[str, list[float]] = {}

    def wanted(self, step: int) -> bool:
        """Whether there is anything to look for at a step."""
        return self._stop or self._due(step)

    def _due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0 and self._report is not None

    def look(self, models: Mapping[str, Any], params: Iterable[nn.Parameter], step: int) -> None:
        """An optimizer is about to step.

        Args:
            models: by name.
            params: of the optimizer.
            step: global step.

        Raises:
            MlxError: a gradient is not finite, and `stop_on_nan` says that this ends the run.
        """
        if not self.wanted(step):
            return
        due = self._due(step)
        given = [param for param in params if param.grad is not None]
        if not given or (not due and _finite([param.grad for param in given])):
            return
        layers = _layers(models, {id(param) for param in given})
        gradient = _norms({name: [param.grad for param in found] for name, found in layers.items()})
        broken = [name for name, norm in gradient.items() if not torch.isfinite(torch.tensor(norm))]
        if broken and self._stop:
            raise MlxError(
                f"the gradient of {broken[0]}{_and_more(broken)} is not finite at step {step} (cfg.stop_on_nan)"
            )
        if broken and not self._told:
            self._told = True
            self._tell(f"the gradient of {broken[0]}{_and_more(broken)} is not finite at step {step}")
        if due and self._report is not None:
            weight = _norms({name: [param.detach() for param in found] for name, found in layers.items()})
            for name, norm in gradient.items():
                self._flow.setdefault(name, []).append(norm)
            named = {f"gradient_norm/{name}": norm for name, norm in gradient.items()}
            self._report(named | {f"weight_norm/{name}": norm for name, norm in weight.items()})

    def picture(self) -> "Figure | None":
        """Mean and largest norm of each layer since the last picture, first layer on top.

        None if no norm was recorded, or if matplotlib is not installed.
        """
        flow, self._flow = self._flow, {}
        if not flow:
            return None
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            if not self._no_matplotlib:
                self._no_matplotlib = True
                self._tell("gradients are recorded but not drawn; for pictures in TensorBoard: pip install matplotlib")
            return None
        figure = Figure(figsize=(8, 1.5 + 0.22 * len(flow)), layout="constrained")
        axes = figure.subplots()
        names = list(flow)
        axes.barh(names, [max(flow[name]) for name in names], color="#c6dbef", label="largest")
        axes.barh(names, [sum(flow[name]) / len(flow[name]) for name in names], color="#2171b5", label="mean")
        axes.invert_yaxis()
        axes.set_xlabel("norm of the gradient")
        axes.legend()
        return figure


def _finite(gradients: list[Any]) -> bool:
    return bool(torch.isfinite(nn.utils.get_total_norm(gradients)))


def _layers(models: Mapping[str, Any], wanted: set[int]) -> dict[str, list[nn.Parameter]]:
    """The parameters of each layer by its name; only those that are wanted."""
    found: dict[str, list[nn.Parameter]] = {}
    for title, model in models.items():
        for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
            params = [param for param in module.parameters(recurse=False) if id(param) in wanted]
            if params:
                found[f"{title}.{path}" if path else title] = params
    return found


def _norms(tensors: Mapping[str, list[Any]]) -> dict[str, float]:
    """The 2-norm of each list of tensors; they come from the device all at once."""
    norms = torch.stack([nn.utils.get_total_norm(items).float() for items in tensors.values()])
    return dict(zip(tensors, norms.tolist(), strict=True))


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more layers)" if len(names) > 1 else ""
