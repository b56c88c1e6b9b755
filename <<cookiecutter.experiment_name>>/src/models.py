"""Models. Edit: write plain torch modules. Give every argument a type and a default, which bind writes to conf.yaml.

Runs read the values from conf.yaml: bind again after changing a default.
"""

import torch
from torch import nn


class ConvBlock(nn.Module):
    """(n, in_channels, h, w) → (n, out_channels, h / 2, w / 2): convolution, norm, ReLU, pooling."""

    def __init__(self, in_channels: int = 1, out_channels: int = 32, kernel_size: int = 3):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size, padding="same", bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class DigitsNet(nn.Module):
    """(n, 1, 8, 8) float32 → logits (n, 10).

    Defaults may be modules. Bind writes their arguments to conf.yaml, and each run builds new modules from them.
    """

    def __init__(
        self,
        first: ConvBlock = ConvBlock(1, 32),
        second: ConvBlock = ConvBlock(32, 64),
        dropout: float = 0.25,
        head: nn.Linear = nn.Linear(64 * 2 * 2, 10),
    ):
        super().__init__()
        self.layers = nn.Sequential(first, second, nn.Flatten(), nn.Dropout(dropout), head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
