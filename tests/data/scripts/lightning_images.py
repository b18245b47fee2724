"""Lightning with checkpoints, a logger, 16-bit precision and a validation loop before the first step."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Images(L.LightningDataModule):
    def __init__(self, batch=32):
        super().__init__()
        self.batch = batch

    def setup(self, stage):
        self.data = TensorDataset(torch.randn(320, 3, 32, 32), torch.randint(0, 10, (320,)))

    def train_dataloader(self):
        return DataLoader(self.data, self.batch, shuffle=True, num_workers=3, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.data, self.batch)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return F.relu(x + self.body(x))


class ResNet(L.LightningModule):
    def __init__(self, channels=64, depth=3, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def training_step(self, batch, index):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log_dict({"loss": loss, "accuracy": (logits.argmax(1) == y).float().mean()}, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=1000)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


if __name__ == "__main__":
    L.seed_everything(7)
    trainer = L.Trainer(
        max_epochs=3, accelerator="gpu", devices=1, precision="16-mixed", logger=CSVLogger("logs"),
        callbacks=[ModelCheckpoint(monitor="val_loss"), LearningRateMonitor("step")], enable_model_summary=False,
    )
    trainer.fit(ResNet(), datamodule=Images())
