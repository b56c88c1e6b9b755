from torch import nn


class BlockEg(nn.Module):
    def __init__(self, input_size: int = 180):
        super().__init__()
        self.layer1 = nn.Linear(input_size, 32)

    def forward(self, x):
        return self.layer1(x)


class DNN(nn.Module):
    def __init__(
        self,
        input_size: int = 180,
        output_size: int = 10,
        layer_widths: tuple[int, ...] = (5, 10, 5),
        block: BlockEg = BlockEg(),
        fc: nn.Linear = nn.Linear(32, 10),
    ):
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        assert isinstance(layer_widths, tuple)
        self.layer_widths = layer_widths
        self.block = block
        self.fc = nn.Linear(32, output_size)

    def forward(self, x):
        x = self.block(x)
        return self.fc(x)


class ResNet(nn.Module):
    """A network that is only used for inference."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.layer = nn.Linear(180, width)

    def forward(self, x):
        return x + 0 * self.layer(x).sum()
