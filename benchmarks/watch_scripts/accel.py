"""A vision transformer under accelerate."""
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--image", type=int, default=224)
parser.add_argument("--mixed-precision", default="no")
parser.add_argument("--steps", type=int, default=100000)
given = parser.parse_args()


class Pictures(Dataset):
    def __len__(self):
        return given.steps * given.batch_size * given.gradient_accumulation_steps

    def __getitem__(self, place):
        return torch.randn(3, given.image, given.image), place % 100


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, given.width, 16, 16)
        self.places = nn.Parameter(torch.zeros(1, (given.image // 16) ** 2, given.width))
        layer = nn.TransformerEncoderLayer(given.width, max(1, given.width // 64), 4 * given.width, dropout=0.0, batch_first=True, norm_first=True)
        self.core = nn.TransformerEncoder(layer, given.layers, enable_nested_tensor=False)
        self.head = nn.Linear(given.width, 100)

    def forward(self, x):
        return self.head(self.core(self.patch(x).flatten(2).transpose(1, 2) + self.places).mean(1))


accelerator = Accelerator(mixed_precision=given.mixed_precision, gradient_accumulation_steps=given.gradient_accumulation_steps)
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(Pictures(), batch_size=given.batch_size, num_workers=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
