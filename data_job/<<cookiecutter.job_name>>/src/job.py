"""The data job. Edit: declare its settings in the groups below, and do the work in run.

`make bind` writes every default below to src/conf.yaml, and each run builds the objects from that file.
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
    """The fields of mlx_runtime.DataConfig (workers, storage, path, …), with the defaults of this job."""

    name: str = "<<cookiecutter.job_name>>"


@dataclass
class Images:
    """Settings of the images.

    Attributes:
        size: height and width in pixels; the originals are 8x8.
        per_shard: number of images in each file.
    """

    size: int = 32
    per_shard: int = 256


class Job(DataJob):
    cfg: JobConfig
    images: Images

    def run(self) -> None:
        """Upscale 1,797 handwritten digits and write them in shards that np.load can map into memory.

        shard_0000_images.npy  (n, size, size) uint8
        shard_0000_labels.npy  (n,) int64
        index.json             size of the images, number of rows of each shard
        """
        count = len(load_digits().target)
        firsts = range(0, count, self.images.per_shard)
        rows = self.map(self.write_shard, firsts, title="shards", key=str)  # cfg.start_workers at a time, on any node
        self.output.write(json.dumps({"size": self.images.size, "rows": rows}), "index.json")

    def write_shard(self, first: int) -> int:
        """Write the shard that begins with image number `first`. Returns its number of rows."""
        digits = load_digits()
        chosen = slice(first, first + self.images.per_shard)
        images = torch.tensor(digits.images[chosen], dtype=torch.float32).unsqueeze(1) * (255 / 16)
        larger = F.interpolate(images, size=self.images.size, mode="bilinear").squeeze(1).round().to(torch.uint8)
        number = first // self.images.per_shard
        self.output.write(npy(larger.numpy()), f"shard_{number:04d}_images.npy")
        self.output.write(npy(digits.target[chosen].astype(np.int64)), f"shard_{number:04d}_labels.npy")
        return len(larger)


def npy(array: np.ndarray) -> bytes:
    """Return an array as the bytes of an .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
