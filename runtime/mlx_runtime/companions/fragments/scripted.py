"""ScriptModules, whose submodules are called in C++, as modules that can be cut between submodules."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

Step = Callable[..., Any]

_VALUES: dict[str, Step] = {
    "prim::ListConstruct": lambda *items: [*items],
    "prim::TupleConstruct": lambda *items: items,
    "prim::TupleUnpack": lambda items: items,
    "prim::ListUnpack": lambda items: items,
}


def opened(model: nn.Module) -> nn.Module:
    """Return a model in which each ScriptModule is an `OpenedModule` with the same tensors, by the same names.

    A model compiled by `torch.compile(model)` is returned without its wrapper.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, ScriptModule):
        return OpenedModule(model)
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, ScriptModule) and not isinstance(module, ScriptModule):
                setattr(module, name, OpenedModule(child))
    return model


def taken(model: nn.Module) -> nn.Module:
    """Return the opened model with parameters of its own, which can be moved; those of its scripts are freed."""
    model = opened(model)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, OpenedModule):
            for name, param in module.named_parameters(recurse=False):
                made[id(param)] = own = made.get(id(param), nn.Parameter(param.detach(), param.requires_grad))
                module._parameters[name] = own
    for module in model.modules():
        if isinstance(module, OpenedModule):
            module.free()
    return model


class OpenedModule(nn.Module):
    """Runs the graph of a ScriptModule from Python, if it has submodules and no branches; otherwise, calls it.

    Attributes:
        steps: nodes of its graph.
        is_open: True if it runs the graph, and for lists of modules, which have none.
    """

    def __init__(self, script: ScriptModule) -> None:
        super().__init__()
        self._script = (script,)  # in a tuple, so that its tensors are not registered twice
        for name, child in script.named_children():
            self.add_module(name, OpenedModule(child))  # type: ignore[arg-type]
        self._parameters.update(script.named_parameters(recurse=False))
        self._buffers.update(script.named_buffers(recurse=False))
        self.training = script.training
        self.steps: list[Any] = []
        with contextlib.suppress(RuntimeError):  # containers have no forward
            self.steps = [*script.graph.nodes()]
        self.is_open = bool(self._modules) and all(map(_is_known, self.steps))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (script,) = self._script
        if not self.is_open:
            if script.training != self.training:
                script.train(self.training)
            self._bind()
            return script(*args, **kwargs)
        _, *wanted = script.forward.schema.arguments  # type: ignore[attr-defined]
        given = dict(zip((item.name for item in wanted), args, strict=False)) | kwargs
        inputs = [given.get(item.name, item.default_value) for item in wanted]
        values = dict(zip((item.debugName() for item in script.graph.inputs()), [self, *inputs], strict=True))
        for node in self.steps:
            found = _result(node, [values[item.debugName()] for item in node.inputs()])
            names = [item.debugName() for item in node.outputs()]
            values.update(zip(names, found if len(names) > 1 else [found], strict=True))
        outputs = [values[item.debugName()] for item in script.graph.outputs()]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def free(self) -> None:
        """Let go of the parameters of the script."""
        (script,) = self._script
        for name in self._parameters:
            script._c.setattr(name, torch.empty(0))

    def _bind(self) -> None:
        """Give the script the tensors of this module, which may have been moved, or replaced for a call."""
        (script,) = self._script
        for name, item in (self._parameters | self._buffers).items():
            script._c.setattr(name, item)
        for child in self.children():
            assert isinstance(child, OpenedModule)
            child._bind()


def _is_known(node: Any) -> bool:
    kind = str(node.kind())
    if kind == "prim::CallMethod":
        return str(node.s("name")) == "forward"
    return kind in (*_VALUES, "prim::GetAttr", "prim::Constant") or kind.startswith("aten::")


def _result(node: Any, inputs: list[Any]) -> Any:
    kind = str(node.kind())
    if kind == "prim::GetAttr":
        return getattr(inputs[0], node.s("name"))
    if kind == "prim::CallMethod":
        return inputs[0](*inputs[1:])
    if kind == "prim::Constant":
        return node.output().toIValue()
    if kind in _VALUES:
        return _VALUES[kind](*inputs)
    schema = torch._C.parse_schema(node.schema())
    overload = getattr(getattr(torch.ops.aten, kind.partition("::")[2]), schema.overload_name or "default")
    pairs = [*zip(schema.arguments, inputs, strict=True)]
    keywords = {item.name: value for item, value in pairs if item.kwarg_only}
    return overload(*(value for item, value in pairs if not item.kwarg_only), **keywords)
