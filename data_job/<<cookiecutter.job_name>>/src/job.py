"""The data job. Edit: say in the groups what it can be told, and do its work in run.

Every default below becomes a line of src/conf.yaml (`make bind`), and is built from there for each run.
"""

import io
import json
from dataclasses import dataclass

import mlx_runtime
import numpy as np
import torch
from mlx_runtime import DataJob
from sklearn.datasets import load_digits
from torch.nn import functional as F


@dataclass
class JobConfig(mlx_runtime.DataConfig):
    """What mlx_runtime.DataConfig has (workers, storage, path, …), with this job's defaults."""

    name: str = "<<cookiecutter.job_name>>"


@dataclass
class Images:
    """What is made of the images.

    Attributes:
        size: height and width in pixels; the originals have 8.
        per_shard: images in each file.
    """

    size: int = 32
    per_shard: int = 256


class Job(DataJob):
    cfg: JobConfig
    images: Images

    def run(self) -> None:
        """1,797 handwritten digits, made larger and cut into shards that np.load maps into memory.

        shard_0000_images.npy  (n, size, size) uint8
        shard_0000_labels.npy  (n,) int64
        index.json             rows of each shard
        """
        count = len(load_digits().target)
        firsts = range(0, count, self.images.per_shard)
        rows = self.map(self.write_shard, firsts, title="shards")  # cfg.start_workers at a time, on any node
        self.output.write(json.dumps({"size": self.images.size, "rows": rows}), "index.json")

    def write_shard(self, first: int) -> int:
        """Make the shard that begins with an image. Returns its rows."""
        digits = load_digits()
        chosen = slice(first, first + self.images.per_shard)
        images = torch.tensor(digits.images[chosen], dtype=torch.float32).unsqueeze(1) * (255 / 16)
        larger = F.interpolate(images, size=self.images.size, mode="bilinear").squeeze(1).round().to(torch.uint8)
        number = first // self.images.per_shard
        self.output.write(npy(larger.numpy()), f"shard_{number:04d}_images.npy")
        self.output.write(npy(digits.target[chosen].astype(np.int64)), f"shard_{number:04d}_labels.npy")
        return len(larger)


def npy(array: np.ndarray) -> bytes:
    """An array as the bytes of an .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
