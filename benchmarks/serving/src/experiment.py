"""Two models to serve: a network for images and a small transformer for tokens, with random weights."""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

import mlx_runtime
from mlx_runtime import DUMMY_PARAMS, BaseModule
from src.networks import TOKENS, WORDS, Images, Words


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "serving"
    num_epochs: int = 1
    start_workers: int = 0
    serves: str = "images"


class Rows(Dataset):
    def __init__(self, rows: int = 64, batch_size: int = 32):
        self.batch_size = batch_size
        random = torch.Generator().manual_seed(0)
        self.images = torch.rand(rows, 1, 8, 8, generator=random)
        self.tokens = torch.randint(WORDS, (rows, TOKENS), generator=random)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index], "tokens": self.tokens[index]}


@dataclass
class Datasets:
    val: Rows = Rows()


@dataclass
class Models:
    images: Images = Images()
    words: Words = Words()

    map_params_to_optimizers = {"images": "sgd", "words": "sgd"}


@dataclass
class Optimizers:
    sgd: torch.optim.SGD = torch.optim.SGD(DUMMY_PARAMS, lr=0.1)


class Experiment(BaseModule):
    cfg: TrainConfig
    datasets: Datasets
    models: Models
    optimizers: Optimizers

    def worker_loop(self, dataset_shards) -> None:
        (val,) = self.generate_loaders(dataset_shards=dataset_shards)
        for _ in val:
            pass
        self.save_checkpoint(0)

    def predict(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        model, column = (self.models.images, "image") if self.cfg.serves == "images" else (self.models.words, "tokens")
        return {"probabilities": model(batch[column]).softmax(1)}
