import torchmetrics as tm
from ray.train.torch import get_device, prepare_model
from torch.optim import Adam
from torch.utils.data import DataLoader

from mlx_runtime import DUMMY_PARAMS, BaseModule
from src import losses as custom_losses
from src import metrics as custom_metrics
from src.configs import TrainConfig
from src.data import TestDataset, TrainDataset, ValDataset
from src.model import DNN, ResNet
from src.tools import EarlyStopping, LRScheduler


class Datasets:
    def __init__(
        self,
        train: TrainDataset = TrainDataset(),
        val: ValDataset = ValDataset(),
        test: TestDataset = TestDataset(),
    ) -> None:
        self.train = train
        self.val = val
        self.test = test


class Models:
    def __init__(self, dnn: DNN = DNN(), resnet: ResNet = ResNet()) -> None:
        self.dnn = dnn
        self.resnet = resnet
        self.map_params_to_optimizers = {"dnn": "adam"}


class Optimizers:
    def __init__(self, adam: Adam = Adam(DUMMY_PARAMS)) -> None:
        self.adam = adam


class Losses:
    def __init__(
        self,
        loss1: tm.MeanSquaredError = tm.MeanSquaredError(),
        loss2: custom_losses.HuberLossMetric = custom_losses.HuberLossMetric(),
    ) -> None:
        self.loss1 = loss1
        self.loss2 = loss2


class Metrics:
    def __init__(
        self,
        mae: tm.MeanAbsoluteError = tm.MeanAbsoluteError(),
        mbd: custom_metrics.MeanBiasDeviation = custom_metrics.MeanBiasDeviation(),
    ) -> None:
        self.mae = mae
        self.mbd = mbd


class Tools:
    def __init__(
        self,
        early_stoppage: EarlyStopping = EarlyStopping(),
        lr_scheduler: LRScheduler = LRScheduler(),
    ):
        self.early_stoppage = early_stoppage
        self.lr_scheduler = lr_scheduler


class Experiment(BaseModule):
    def __init__(
        self,
        cfg: TrainConfig,
        models: Models,
        datasets: Datasets,
        losses: Losses,
        optimizers: Optimizers,
        metrics: Metrics,
        tools: Tools,
    ):
        super().__init__(
            cfg=cfg,
            models=models,
            datasets=datasets,
            optimizers=optimizers,
            losses=losses,
            metrics=metrics,
            tools=tools,
        )
        self.tools.lr_scheduler.total_steps = (
            len(self.datasets.train) // self.datasets.train.batch_size * self.cfg.num_epochs
        )

    def worker_loop(self, dataset_shards):
        self.models.dnn = prepare_model(self.models.dnn)
        self.models.resnet = self.models.resnet.to(get_device())

        train_loader, _, _ = self.generate_loaders(dataset_shards=dataset_shards)

        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.train_steps(dataloader=train_loader, epoch=epoch)

            dummy_val_loss = 69
            if self.tools.early_stoppage(dummy_val_loss):
                break

            self.save_checkpoint(
                epoch=epoch,
                metrics={},
            )

    def train_steps(self, dataloader: DataLoader, epoch: int):
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(dataloader):
            x = batch["inputs"]
            y = batch["label"]

            output = self.models.dnn(x)

            loss = self.losses.loss1(output, y)
            loss.backward()

            self.losses.loss1.update(output, y)
            self.metrics.mae.update(output, y)

            self.save_metrics_and_losses(
                batch_idx=batch_idx,
                epoch=epoch,
            )

            self.optimizers.adam.step()
            self.optimizers.adam.zero_grad()

            self.tools.lr_scheduler.step(self.optimizers.adam)
