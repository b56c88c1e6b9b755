"""The networks of all contenders."""

import torch
from torch import nn

TOKENS, WORDS, WIDTH = 64, 1000, 128


class Images(nn.Sequential):
    """(n, 1, 8, 8) float32 → logits (n, 10): the network of the template."""

    def __init__(self, channels: int = 32):
        layers: list[nn.Module] = []
        for before, after in ((1, channels), (channels, 2 * channels)):
            convolution = nn.Conv2d(before, after, 3, padding="same", bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.Flatten(), nn.Dropout(0.25), nn.Linear(8 * channels, 10))


class Words(nn.Module):
    """(n, 64) int64 → logits (n, 10): a transformer with two layers and 0.5 million parameters."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)).mean(1))


NETWORKS = {"images": (Images, "image"), "words": (Words, "tokens")}
"""The class of each network, and the column that it reads."""


def example(name: str) -> object:
    """Return the content of a row."""
    random = torch.Generator().manual_seed(1)
    if name == "images":
        return torch.rand(1, 8, 8, generator=random).tolist()
    return torch.randint(WORDS, (TOKENS,), generator=random).tolist()
