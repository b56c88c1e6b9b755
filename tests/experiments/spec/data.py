import torch
from torch.utils.data import Dataset


class TrainDataset(Dataset):
    def __init__(self, batch_size: int = 32, unused_data_arg: int = 0):
        self.batch_size = batch_size
        self.unused_data_arg = unused_data_arg
        self.data = torch.randn(1000, 180)
        self.labels = torch.randn(1000, 10)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        return self.data[idx], self.labels[idx]

    @staticmethod
    def ray_map_batches(batch):
        batch = batch["item"]
        data = torch.stack([row[0].clone().detach() for row in batch])
        labels = torch.stack([row[1].clone().detach() for row in batch])
        return {"inputs": data, "label": labels}


class ValDataset(TrainDataset):
    def __init__(self, batch_size: int = 32):
        super().__init__(batch_size)


class TestDataset(ValDataset):
    pass
