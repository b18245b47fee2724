"""Lightning with optimization by hand: dataclass batches, a frozen encoder, an EMA callback, kept gradients."""

from dataclasses import dataclass, field

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Settings:
    width: int = 192
    layers: int = 3
    batch: int = 48
    lr: float = 3e-4


@dataclass
class Batch:
    signal: torch.Tensor
    label: torch.Tensor
    names: list = field(default_factory=list)

    def to(self, *args, **kwargs):
        return Batch(self.signal.to(*args, **kwargs), self.label.to(*args, **kwargs), self.names)


class Signals(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        return torch.randn(8, 256), index % 5, f"signal-{index}"


def collate(rows):
    signals, labels, names = zip(*rows)
    return Batch(torch.stack(signals), torch.tensor(labels), list(names))


class Ema(Callback):
    def on_fit_start(self, trainer, module):
        self.average = AveragedModel(module.head, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.average.update_parameters(module.head)


class Classifier(L.LightningModule):
    def __init__(self, settings):
        super().__init__()
        self.settings, self.automatic_optimization = settings, False
        self.encoder = nn.Conv1d(8, settings.width, 8, stride=8).requires_grad_(False)
        self.body = nn.LSTM(settings.width, settings.width, settings.layers, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.LayerNorm(settings.width), nn.Linear(settings.width, 5))

    def forward(self, signal):
        states, _ = self.body(self.encoder(signal).transpose(1, 2))
        return self.head(states[:, -1])

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(self(batch.signal), batch.label)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        self.log("loss", loss, batch_size=len(batch.names))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.settings.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


if __name__ == "__main__":
    settings = Settings()
    loader = DataLoader(Signals(), settings.batch, collate_fn=collate, num_workers=2)
    callbacks = [Ema(), EarlyStopping("loss", check_on_train_epoch_end=True)]
    trainer = L.Trainer(max_epochs=2, accelerator="cuda", devices=1, callbacks=callbacks, logger=False, enable_checkpointing=False, benchmark=True)
    trainer.fit(Classifier(settings), loader)
