"""A model that returns a dict: its loss, predictions, and losses of tasks to look at."""
import torch
from torch import nn
import torch.nn.functional as F


class Faces(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.InstanceNorm2d(16), nn.PReLU(16), nn.Conv2d(16, 32, 3, 2, 1), nn.PReLU(32))
        self.heads = nn.ModuleDict({"age": nn.Linear(32, 1), "gender": nn.Linear(32, 2)})
        self.log_vars = nn.ParameterDict({task: nn.Parameter(torch.zeros(())) for task in self.heads})

    def forward(self, image, age=None, gender=None, **unused):
        h = self.trunk(image).mean(dim=[2, 3])
        out = {task: head(h) for task, head in self.heads.items()}
        losses = {"age": F.smooth_l1_loss(out["age"].squeeze(1), age), "gender": F.cross_entropy(out["gender"], gender)}
        total = sum(torch.exp(-self.log_vars[task]) * one + self.log_vars[task] for task, one in losses.items())
        return {"predictions": out, "loss": total, **{f"loss_{task}": one for task, one in losses.items()}}


def build():
    return Faces()


def batch(micro_batch):
    names = [f"face_{i}.png" for i in range(micro_batch)]
    return {"image": torch.rand(micro_batch, 3, 32, 32), "age": torch.rand(micro_batch), "gender": torch.arange(micro_batch) % 2, "name": names}
