"""A transformer encoder trained by Lightning."""
import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--accumulate_grad_batches", type=int, default=1)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--precision", default="32-true")
parser.add_argument("--steps", type=int, default=100000)
given = parser.parse_args()


class Rows(Dataset):
    def __len__(self):
        return given.steps * given.batch_size * given.accumulate_grad_batches

    def __getitem__(self, place):
        return torch.randn(given.length, given.width), torch.randint(0, 10, ()).item()


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(given.width, max(1, given.width // 64), 4 * given.width, dropout=0.0, batch_first=True, norm_first=True)
        self.core = nn.TransformerEncoder(layer, given.layers, enable_nested_tensor=False)
        self.head = nn.Linear(given.width, 10)

    def training_step(self, batch, number):
        x, y = batch
        return F.cross_entropy(self.head(self.core(x).mean(1)), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


trainer = L.Trainer(
    max_steps=given.steps, accelerator="auto", devices=1, precision=given.precision, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=given.accumulate_grad_batches,
)
trainer.fit(Model(), DataLoader(Rows(), batch_size=given.batch_size, num_workers=2))
