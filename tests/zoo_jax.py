"""Defaults of Flax NNX and Optax, one per group, written like user code. See zoo.py.

Nothing here computes when it is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx import initializers as init
from jax.sharding import PartitionSpec


class Block(nnx.Module):
    def __init__(self, width: int = 4, rate: float = 0.1, act: Callable[..., Any] = nnx.relu, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.act = act

    @classmethod
    def wide(cls, by: int = 2, *, rngs: nnx.Rngs) -> "Block":
        return cls(4 * by, rngs=rngs)


class Net(nnx.Module):
    def __init__(
        self,
        first: Block = Block(8),
        head: nnx.Linear = nnx.Linear(8, 2),
        shape: tuple[int, ...] = (1, 2),
        *,
        rngs: nnx.Rngs,
    ):
        self.first, self.head, self.shape = first, head, shape
        self.noise = nnx.Param(jax.random.normal(rngs.params(), (3,)))


class Early(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 2):
        self.linear = nnx.Linear(width, width, rngs=rngs)


@nnx.dataclass
class Fields(nnx.Module):
    width: int = 3
    inner: nnx.Module = Block(3)


@jax.jit
def squared(x: jax.Array) -> jax.Array:
    return x * x


def make_net(width: int = 3, *, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(width, width, rngs=rngs), squared)


def repeated(net: nnx.Module, count: int = 2) -> nnx.Module:
    return nnx.Sequential(*[net] * count)


class Around:
    """A tool, which is declared because its argument is."""

    def __init__(self, net: nnx.Module = Block(6)):
        self.net = net


BLOCK = Block(2)


@dataclass
class Kept:
    """Each default is re-created exactly."""

    typed: Net
    module: nnx.Module = Block()
    nested: nnx.Module = Net()
    nested_arguments: nnx.Module = Net(Block(16, 0.5, jax.nn.gelu), head=nnx.Linear(16, 3, use_bias=False))
    placeholders: nnx.Module = Net(Block(16, rngs=nnx.Rngs()), rngs=nnx.Rngs())
    own_seed: nnx.Module = Block(3, rngs=nnx.Rngs(7))
    own_seeds: nnx.Module = Block(3, rngs=nnx.Rngs(params=7, dropout=8))
    early: nnx.Module = Early(width=5)
    positional: nnx.Module = Early(nnx.Rngs(), 5)
    seeded: nnx.Module = Early(nnx.Rngs(7), 5)
    fields: nnx.Module = Fields()
    linear: nnx.Linear = nnx.Linear(3, 4)
    dtypes: nnx.Linear = nnx.Linear(3, 4, dtype=jnp.bfloat16, param_dtype=jnp.float16)
    he_init: nnx.Linear = nnx.Linear(3, 4, kernel_init=init.he_normal())
    scaling_init: nnx.Linear = nnx.Linear(3, 4, kernel_init=init.variance_scaling(1.0, "fan_in", "normal"))
    partitioned: nnx.Linear = nnx.Linear(3, 4, kernel_init=nnx.with_partitioning(init.normal(0.02), (None, "model")))
    metadata: nnx.Linear = nnx.Linear(3, 4, kernel_metadata={"out_sharding": (None, "model")})
    conv: nnx.Conv = nnx.Conv(1, 4, (3, 3), strides=2, padding="VALID")
    precision: nnx.Linear = nnx.Linear(3, 4, precision=jax.lax.Precision.HIGHEST)
    embed: nnx.Embed = nnx.Embed(10, 4)
    attention: nnx.Module = nnx.MultiHeadAttention(2, 8, decode=False)
    recurrent: nnx.Module = nnx.RNN(nnx.LSTMCell(3, 4))
    lora: nnx.Module = nnx.LoRA(3, 2, 4)
    sequential: nnx.Module = nnx.Sequential(nnx.Linear(3, 4), nnx.relu, nnx.Linear(4, 2))
    thrice: nnx.Module = nnx.Sequential(*[Block(3) for _ in range(3)])
    layers: nnx.Module = nnx.List([Block(3), Block(4)])
    by_classmethod: nnx.Module = Block.wide(3)
    by_function: nnx.Module = make_net(5)
    wrapped: nnx.Module = repeated(Block(5))
    tool: Around = Around()
    constant: nnx.Module = BLOCK
    partial_module: Callable[..., nnx.Module] = partial(Block, 5, rate=0.2)
    metrics: Any = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    a_class: type = nnx.BatchNorm
    activation: Callable[..., Any] = nnx.gelu
    jitted: Callable[..., Any] = squared
    a_dtype: Any = jnp.bfloat16
    spec: Any = PartitionSpec("data", None)
    initializer: Callable[..., Any] = init.truncated_normal(0.02)
    bound: Callable[..., optax.GradientTransformation] = partial(optax.adamw, weight_decay=1e-4)
    bound_schedule: Any = partial(optax.warmup_cosine_decay_schedule, init_value=0.0, peak_value=3e-3)
    adam: optax.GradientTransformation = optax.adam(1e-3)
    adamw: optax.GradientTransformation = optax.adamw(1e-3, weight_decay=0.1, mu_dtype=jnp.bfloat16)
    schedule: optax.Schedule = optax.cosine_decay_schedule(1e-3, 100)
    scheduled: Any = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100))
    chain: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9, nesterov=True))
    multi_steps: Any = optax.MultiSteps(optax.adam(1e-3), 4)
    joined: Any = optax.join_schedules([optax.linear_schedule(0.0, 1.0, 10), optax.constant_schedule(1.0)], [10])
    lion: Any = optax.lion(1e-4)
    muon: Any = optax.contrib.muon(1e-3)
    adafactor: Any = optax.adafactor(1e-3)
    lbfgs: Any = optax.lbfgs()
    masked: Any = optax.masked(optax.sgd(0.1), True)
    partition: Any = optax.partition({"a": optax.sgd(0.1), "b": optax.set_to_zero()}, {"w": "a"})
    schedule_free: Any = optax.contrib.schedule_free_adamw(1e-3)
    loss: Callable[..., Any] = optax.softmax_cross_entropy_with_integer_labels
    made: nnx.Module = field(default_factory=lambda: Block(7))


class RefuseLambda:
    def __init__(self, it: nnx.Module = nnx.Sequential(nnx.Linear(3, 3), lambda x: 2 * x)): ...


class RefuseLambdaSchedule:
    def __init__(self, it: Any = optax.sgd(lambda step: 0.1 / (step + 1))): ...


class RefuseInjected:
    def __init__(self, it: Any = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)): ...
