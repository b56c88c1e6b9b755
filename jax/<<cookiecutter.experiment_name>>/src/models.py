"""Models. Edit: write plain modules of Flax NNX. Give every argument a type and a default, for conf.yaml.

Runs read the values from conf.yaml: bind again after changing a default. In defaults, `nnx.Rngs()` stands for random
streams that depend on cfg.seed, which a run passes.
"""

import jax
from flax import nnx


class ConvBlock(nnx.Module):
    """(n, h, w, in_features) → (n, h / 2, w / 2, out_features): convolution, norm, ReLU, pooling."""

    def __init__(self, in_features: int = 1, out_features: int = 32, kernel_size: int = 3, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(in_features, out_features, (kernel_size, kernel_size), use_bias=False, rngs=rngs)
        self.norm = nnx.GroupNorm(out_features, num_groups=8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), strides=(2, 2))


class DigitsNet(nnx.Module):
    """(n, 1, 8, 8) float32 → logits (n, 10).

    Defaults may be modules, which are only declared here: JAX must not compute before the workers are connected. Bind
    writes their arguments to conf.yaml, and each run builds new modules from them.
    """

    def __init__(
        self,
        first: ConvBlock = ConvBlock(1, 32, rngs=nnx.Rngs()),
        second: ConvBlock = ConvBlock(32, 64, rngs=nnx.Rngs()),
        dropout: float = 0.25,
        head: nnx.Linear = nnx.Linear(64 * 2 * 2, 10, rngs=nnx.Rngs()),
        *,
        rngs: nnx.Rngs,
    ):
        self.first, self.second, self.head = first, second, head
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.second(self.first(x.transpose(0, 2, 3, 1)))  # the layers of Flax have the channels last
        return self.head(self.dropout(x.reshape(len(x), -1)))
