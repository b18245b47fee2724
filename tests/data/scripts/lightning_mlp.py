import argparse
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self, width=512, classes=10, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = self.criterion(out, y)
        self.log("loss", loss, prog_bar=True)
        self.log("acc", (out.argmax(-1) == y).float().mean())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", self.criterion(self(x), y))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 10)}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=64)
    a = p.parse_args()
    L.seed_everything(0)
    data = TensorDataset(torch.randn(2000, 3, 32, 32), torch.randint(0, 10, (2000,)))
    trainer = L.Trainer(max_epochs=2, accelerator="gpu", devices=1, precision="bf16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=2)
    trainer.fit(Lit(), DataLoader(data, a.batch, shuffle=True, num_workers=2), DataLoader(data, a.batch))


if __name__ == "__main__":
    main()
