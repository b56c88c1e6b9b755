"""REINFORCE (Williams, 1992) on carts that balance poles: a loop without a dataset, whose steps are its updates.

Checkpoints contain the states of the carts, so that a resumed run continues their episodes. Copy this file over
`src/experiment.py`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torchmetrics import MeanMetric

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule, get_device, prepare_model
from mlx_runtime.datasets import DatasetShards


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "rl"
    num_epochs: int = 12
    updates_per_epoch: int = 5
    discount: float = 0.97
    start_workers: int = 2
    monitor: str | None = "train/length"
    mode: Literal["max", "min"] = "max"


class CartPole:
    """Carts that move along a track, each with a pole to balance (Barto, Sutton and Anderson, 1983).

    An episode ends when the pole falls, the cart leaves the track, or after `longest` steps of 0.02 s.
    """

    per_worker = True  # each worker has carts of its own

    def __init__(self, carts: int = 16, longest: int = 200):
        self.carts, self.longest = carts, longest
        self.state, self.steps = self.start(), torch.zeros(carts)  # position, its velocity, angle, its velocity: (n, 4)

    def start(self) -> torch.Tensor:
        return 0.1 * torch.rand(self.carts, 4) - 0.05

    def step(self, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push each cart to the right or left; return whether its episode has ended, and the steps of the episode."""
        dx, angle, turn = self.state[:, 1:].unbind(1)
        push = (20 * right - 10 + 0.05 * turn.square() * angle.sin()) / 1.1
        turning = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        moving = push - 0.05 * turning * angle.cos() / 1.1
        self.state = self.state + 0.02 * torch.stack([dx, moving, turn, turning], 1)
        self.steps = self.steps + 1
        lengths = self.steps
        ended = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21) | (lengths == self.longest)
        self.state = torch.where(ended[:, None], self.start(), self.state)
        self.steps = torch.where(ended, 0, lengths)
        return ended, lengths


class Policy(nn.Module):
    """The state of a cart, (n, 4), to the logit of pushing it to the right, (n,)."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.layers(state)[..., 0]


@dataclass
class Models:
    policy: Policy = Policy()

    map_params_to_optimizers = {"policy": "adam"}


@dataclass
class Optimizers:
    adam: Adam = Adam(DUMMY_PARAMS, lr=1e-2)


@dataclass
class Metrics:
    length: MeanMetric = MeanMetric()


@dataclass
class Tools:
    world: CartPole = CartPole()


class Experiment(BaseModule):
    cfg: TrainConfig
    models: Models
    optimizers: Optimizers
    metrics: Metrics
    tools: Tools

    def worker_loop(self, dataset_shards: DatasetShards) -> None:
        self.models.policy = prepare_model(self.models.policy)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            for update in range(self.cfg.updates_per_epoch):
                states, actions, returns = self.play()
                logits = self.models.policy(states)
                advantages = (returns - returns.mean()) / returns.std()
                log_probs = -F.binary_cross_entropy_with_logits(logits, actions, reduction="none")
                self.backward(-(advantages * log_probs).mean())
                self.optimizer_step()  # counted by self.global_step, because there is no loader
                self.save_metrics(batch_idx=update, epoch=epoch)
            self.save_checkpoint(epoch=epoch)

    @torch.no_grad()
    def play(self, steps: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return states (steps, carts, 4), actions and discounted returns, both (steps, carts)."""
        world, device = self.tools.world, get_device()
        states, actions, ends = [], [], []
        for _ in range(steps):
            states.append(world.state)
            right = torch.sigmoid(self.models.policy(world.state.to(device))).cpu()
            actions.append(torch.bernoulli(right))
            ended, lengths = world.step(actions[-1])
            ends.append(ended)
            if ended.any():
                self.metrics.length.update(lengths[ended].to(device))
        returns = torch.zeros(steps, world.carts)
        ahead = torch.zeros(world.carts)
        for step in reversed(range(steps)):
            ahead = returns[step] = 1 + self.cfg.discount * ahead * ~ends[step]
        return torch.stack(states).to(device), torch.stack(actions).to(device), returns.to(device)
