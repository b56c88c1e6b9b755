"""The workload of all contenders: a small transformer that learns the bytes of texts of different lengths."""

import ast
import json
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

LONGEST, BATCH, LEARNING_RATE, WIDTH = 512, 16, 1e-3, 64
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
WARM = 5
"""Number of steps before the measurement."""

Batch = dict[str, torch.Tensor]


def docstrings() -> list[str]:
    """Return the docstrings in the modules of Python's standard library, without those of its packages."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    nodes = (node for module in modules for node in ast.walk(ast.parse(module.read_text("utf-8"))))
    return list(filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED))))


class Texts(Dataset[Batch]):
    """Docstrings as bytes {"tokens": (length,) int64}, of which at most `LONGEST`.

    Args:
        padding: batches are as long as the longest text of the `batch`, or as `LONGEST`.
        grouped: batches are of texts of similar lengths.
        batch_size: texts per worker and step.
    """

    def __init__(self, padding: str = "batch", grouped: bool = False, batch_size: int = BATCH) -> None:
        self.padding, self.batch_size = padding, batch_size
        self.texts = [torch.tensor(list(text.encode()[:LONGEST])) for text in docstrings()]
        self.lengths = [len(text) for text in self.texts]
        if grouped:
            self.group_by_length = self.lengths

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Batch:
        return {"tokens": self.texts[index]}

    def collate(self, rows: list[Batch]) -> Batch:
        """Return {"tokens": (n, length) int64}, padded with 0."""
        tokens = pad_sequence([row["tokens"] for row in rows], batch_first=True)
        wanted = LONGEST if self.padding == "longest" else tokens.shape[1]
        return {"tokens": F.pad(tokens, (0, wanted - tokens.shape[1]))}


class Net(nn.Module):
    """Bytes (n, length) int64 → logits (n, length, 256) for the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens), src_key_padding_mask=tokens == 0))


def step(network: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    logits = network(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Clock:
    """Measures the tokens of this worker, and those that fit in its batches."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.places = 0
        self.started = 0.0

    def count(self, tokens: torch.Tensor) -> None:
        self.steps += 1
        if self.steps == WARM:
            self.started = time.perf_counter()
        elif self.steps > WARM:
            self.tokens += int((tokens != 0).sum())
            self.places += tokens.numel()

    def write(self, out: Path, texts: int, workers: int) -> None:
        """Write the tokens per second of all workers, and the part of batches that is not padding."""
        rate = workers * self.tokens / (time.perf_counter() - self.started)
        out.write_text(json.dumps({"tokens_per_s": rate, "used": self.tokens / self.places, "texts": texts}))
