"""Losses. Edit: write functions of arrays for JAX, and Metrics that average their values."""

import jax
import optax
from torchmetrics import MeanMetric


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Return the cross-entropy of each row, (n,), of logits (n, classes) against labels (n,)."""
    targets = jax.nn.one_hot(labels, logits.shape[-1])
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(targets, label_smoothing))


class CrossEntropy(MeanMetric):
    """Mean cross-entropy over all rows of all workers, updated with the values of `cross_entropy`."""

    def __init__(self, label_smoothing: float = 0.0):
        super().__init__(nan_strategy="disable")  # NaN is recorded, not left out
        self.label_smoothing = label_smoothing
