"""Datasets. Edit: write plain torch Datasets, with a ray_map_batches that stacks samples into a batch."""

from typing import Literal

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

Sample = tuple[torch.Tensor, torch.Tensor]


class Digits(Dataset[Sample]):
    """Handwritten digits: 1,797 grayscale images of 8x8 pixels, bundled with scikit-learn (UCI Optical Recognition).

    A sample is (image (1, 8, 8) float32 in [0, 1], label () int64 in [0, 9]).

    Args:
        split: 70 % of the images are for training, 15 % for validation, 15 % for testing.
        batch_size: rows per worker and step.
        split_seed: seed for assigning the images to splits.
    """

    def __init__(self, split: Literal["train", "val", "test"] = "train", batch_size: int = 32, split_seed: int = 0):
        self.batch_size = batch_size
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(split_seed))
        first, second = int(0.7 * len(order)), int(0.85 * len(order))
        rows = {"train": order[:first], "val": order[first:second], "test": order[second:]}[split]
        self.images = torch.tensor(digits.images, dtype=torch.float32)[rows].unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)[rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return self.images[index], self.labels[index]

    @staticmethod
    def ray_map_batches(batch: dict[str, list[Sample]]) -> dict[str, torch.Tensor]:
        """Stack {"item": [sample, …]} into tensors with one row per sample: image (n, 1, 8, 8), label (n,)."""
        images, labels = zip(*batch["item"], strict=True)
        return {"image": torch.stack(images), "label": torch.stack(labels)}
