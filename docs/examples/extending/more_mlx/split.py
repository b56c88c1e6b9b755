"""A strategy that splits models between two workers: `cfg.strategy=more_mlx.split.Split`.

The first worker of each pair holds the first half of an `nn.Sequential`, the second one the rest. Each has the layers
of the other on the meta device, where they have shapes but no values.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from mlx_runtime.strategies import DDP, ConfigError, data_parallel_group, gather


class Split(DDP):
    shards = True  # the workers hold different parts

    @staticmethod
    def refusal(cfg):
        return "it has no scaler for cfg.precision=fp16" if cfg.precision == "fp16" else DDP.refusal(cfg)

    @staticmethod
    def multiple_of(cfg):
        return 2

    @staticmethod
    def model_parallel_size(cfg, workers):
        return 2

    def place(self, models):
        super().place(models)  # both workers have built whole models, from the same random numbers
        peer, self.replicas, self.synchronizes = self.topology.rank ^ 1, data_parallel_group(self.topology), True
        for name, model in models.items():
            if not isinstance(model, nn.Sequential):
                raise ConfigError(f"models.{name} is a {type(model).__name__}; only an nn.Sequential can be split")
            middle, second = len(model) // 2, self.topology.rank % 2
            halves = nn.Sequential(*list(model)[:middle]), nn.Sequential(*list(model)[middle:])
            halves[1 - second].to("meta")
            model.forward = partial(second_forward if second else first_forward, *halves, peer)
            for param in halves[second].parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(self.average)
            model.register_load_state_dict_pre_hook(without_values_of_others)

    def average(self, param):
        """Average a gradient over the workers that hold the same part in other replicas."""
        if self.synchronizes:
            dist.all_reduce(param.grad, group=self.replicas)
            param.grad /= self.topology.data_parallel_size

    def sync_gradients(self, models, enabled):
        self.synchronizes = enabled

    def clip_grad_norm_(self, parameters, max_norm):
        own = [param for param in parameters if param.grad is not None]
        square = nn.utils.get_total_norm([param.grad for param in own]) ** 2
        dist.all_reduce(square)
        norm = (square / self.topology.data_parallel_size) ** 0.5
        nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm

    def prepare_optimizers(self, optimizers):
        for optimizer in optimizers.values():
            optimizer.register_load_state_dict_post_hook(forget_others)

    def consolidate(self, states):
        parts = gather(with_values(states) if self.topology.data_parallel_rank == 0 else None)
        return united(*parts[:2]) if parts is not None else states


def first_forward(first, second, peer, x):
    """Send activations to the other worker, and return its output."""
    hidden = first(x)
    return Handover.apply(hidden, second(hidden.detach().to("meta")), peer)


def second_forward(first, second, peer, x):
    hidden = torch.empty_like(first(x.to("meta")), device=x.device)
    dist.recv(hidden, peer)
    if torch.is_grad_enabled():
        hidden.requires_grad_().register_hook(lambda gradient: dist.send(gradient.contiguous(), peer))
    output = second(hidden)
    dist.send(output.detach().contiguous(), peer)
    return output


class Handover(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, like, peer):
        ctx.peer, output = peer, torch.empty_like(like, device=hidden.device)
        ctx.save_for_backward(hidden)
        dist.send(hidden.contiguous(), peer)
        dist.recv(output, peer)
        return output

    @staticmethod
    def backward(ctx, gradient):  # the other worker has started from the gradient of the same loss
        received = torch.empty_like(ctx.saved_tensors[0])
        dist.recv(received, ctx.peer)
        return received, None, None


def without_values_of_others(model, state, prefix, *_):
    for name, own in model.state_dict(prefix=prefix).items():
        if own.is_meta and name in state:
            state[name] = state[name].to("meta")


def forget_others(optimizer):
    for param in [param for param in optimizer.state if param.is_meta]:
        del optimizer.state[param]


def with_values(value):
    """Return plain values without tensors that only the other worker holds."""
    if not isinstance(value, dict):
        return value
    lacking = {name for name, item in value.items() if isinstance(item, torch.Tensor) and item.is_meta}
    return {name: with_values(item) for name, item in value.items() if name not in lacking}


def united(one, other):
    """Return the union of the plain values of both workers."""
    if not isinstance(one, dict):
        return one
    return {name: united(one.get(name, other.get(name)), other.get(name, {})) for name in {**one, **other}}
