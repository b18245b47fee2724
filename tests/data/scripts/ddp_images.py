"""torchrun --standalone --nproc_per_node=8 ddp_images.py"""
import argparse
import json
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    batch: int = 32
    width: int = 32
    classes: int = 100
    lr: float = 0.1
    epochs: int = 3
    out: str = "runs/images"


class Pictures(Dataset):
    def __init__(self, count, classes):
        self.count, self.classes = count, classes

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.full((3, 32, 32), i / self.count), i % self.classes


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


class Net(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.body = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2), Residual(4 * width, 8 * width, 2))
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Trainer:
    def __init__(self, config):
        self.config, self.rank, self.local = config, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.device = f"cuda:{self.local}"
        net = Net(config.width, config.classes).to(self.device)
        self.ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.999)).requires_grad_(False) if self.rank == 0 else None
        self.model = DistributedDataParallel(net, device_ids=[self.local])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
        self.train_data, self.test_data = Pictures(5000, config.classes), Pictures(1000, config.classes)
        self.sampler = DistributedSampler(self.train_data)
        self.loader = DataLoader(self.train_data, config.batch, sampler=self.sampler, num_workers=4, persistent_workers=True, drop_last=True)
        self.test_loader = DataLoader(self.test_data, config.batch, sampler=DistributedSampler(self.test_data, shuffle=False))
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, config.lr, epochs=config.epochs, steps_per_epoch=len(self.loader))
        if self.rank == 0:
            os.makedirs(config.out, exist_ok=True)
            with open(f"{config.out}/config.json", "w") as file:
                json.dump(asdict(config), file)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        right = torch.zeros(2, device=self.device)
        for x, y in self.test_loader:
            x, y = x.to(self.device), y.to(self.device)
            right += torch.stack([(self.model(x).argmax(1) == y).sum(), torch.tensor(len(y), device=self.device)])
        dist.all_reduce(right)
        self.model.train()
        return (right[0] / right[1]).item()

    def fit(self):
        for epoch in range(self.config.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
                self.optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = F.cross_entropy(self.model(x), y, label_smoothing=0.1)
                loss.backward()
                self.optimizer.step()
                self.schedule.step()
                if self.ema is not None:
                    self.ema.update_parameters(self.model.module)
            accuracy = self.evaluate()
            if self.rank == 0:
                print(f"epoch {epoch}: {accuracy:.1%}")
                torch.save(self.ema.state_dict(), f"{self.config.out}/ema.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    dist.init_process_group("nccl")
    torch.backends.cudnn.benchmark = True
    Trainer(Config(batch=parser.parse_args().batch)).fit()
    dist.destroy_process_group()
