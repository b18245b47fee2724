"""In the style of an image model zoo's train script: models by name, EMA, mixup, a scaler, warmup, a saver of checkpoints."""

import argparse
import copy
import json
import logging
import math
import os
import time
from collections import OrderedDict
from contextlib import suppress

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

_logger = logging.getLogger("train")
MODELS = {}


def register(function):
    MODELS[function.__name__] = function
    return function


class ConvNormAct(nn.Sequential):
    def __init__(self, cin, cout, k=3, s=1, groups=1):
        super().__init__(nn.Conv2d(cin, cout, k, s, k // 2, groups=groups, bias=False), nn.BatchNorm2d(cout), nn.SiLU(inplace=True))


class MBConv(nn.Module):
    def __init__(self, cin, cout, stride, drop=0.0):
        super().__init__()
        mid = 4 * cin
        self.expand, self.depth = ConvNormAct(cin, mid, 1), ConvNormAct(mid, mid, 3, stride, groups=mid)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(mid, cin // 4, 1), nn.SiLU(), nn.Conv2d(cin // 4, mid, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(mid, cout, 1, bias=False), nn.BatchNorm2d(cout))
        self.same, self.drop = stride == 1 and cin == cout, drop

    def forward(self, x):
        y = self.depth(self.expand(x))
        y = self.project(y * self.squeeze(y))
        if not self.same:
            return y
        if self.drop and self.training:
            y = y * y.new_empty((y.shape[0], 1, 1, 1)).bernoulli_(1 - self.drop).div_(1 - self.drop)
        return x + y


class EfficientNet(nn.Module):
    def __init__(self, widths, depths, num_classes, drop_rate=0.0):
        super().__init__()
        self.stem = ConvNormAct(3, widths[0], 3, 2)
        blocks = []
        for width, before, depth in zip(widths[1:], widths[:-1], depths):
            blocks += [MBConv(before if n == 0 else width, width, 2 if n == 0 else 1, drop_rate) for n in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.head, self.drop, self.classifier = ConvNormAct(widths[-1], 256, 1), nn.Dropout(0.2), nn.Linear(256, num_classes)

    def forward(self, x):
        return self.classifier(self.drop(self.head(self.blocks(self.stem(x))).mean((2, 3))))


@register
def tiny_effnet(num_classes=10, **kwargs):
    return EfficientNet((16, 24, 40, 80), (2, 2, 3), num_classes, **kwargs)


def create_model(name, **kwargs):
    if name not in MODELS:
        raise RuntimeError(f"Unknown model ({name})")
    return MODELS[name](**kwargs)


class FakeImages(Dataset):
    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.randn(3, self.size, self.size), index % 10


class Mixup:
    def __init__(self, alpha, classes, smoothing):
        self.alpha, self.classes, self.smoothing = alpha, classes, smoothing

    def __call__(self, x, target):
        lam = float(torch.distributions.Beta(self.alpha, self.alpha).sample())
        off = self.smoothing / self.classes
        soft = torch.full((len(target), self.classes), off, device=x.device).scatter_(1, target[:, None], 1.0 - self.smoothing + off)
        mixed = x.flip(0).mul_(1.0 - lam)
        x.mul_(lam).add_(mixed)
        return x, soft * lam + soft.flip(0) * (1.0 - lam)


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model), decay
        self.module.eval()

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values()):
            mine.copy_(self.decay * mine + (1.0 - self.decay) * theirs)


class CheckpointSaver:
    def __init__(self, folder):
        self.folder, self.best = folder, None
        os.makedirs(folder, exist_ok=True)

    def save(self, model, optimizer, epoch, metric):
        torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, os.path.join(self.folder, "last.pth.tar"))
        if self.best is None or metric > self.best:
            self.best = metric


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None):
        self._scaler.scale(loss).backward()
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n=1):
        self.sum, self.count = self.sum + value * n, self.count + n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def add_weight_decay(model, weight_decay):
    decay, none = [], []
    for name, parameter in model.named_parameters():
        (none if parameter.ndim <= 1 or name.endswith(".bias") else decay).append(parameter)
    return [{"params": none, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


def parse_args():
    config_parser = parser = argparse.ArgumentParser(description="Training Config", add_help=False)
    parser.add_argument("-c", "--config", default="", metavar="FILE")
    parser = argparse.ArgumentParser(description="Training")
    parser.add_argument("--model", default="tiny_effnet")
    parser.add_argument("--img-size", type=int, default=64)
    parser.add_argument("-b", "--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--clip-grad", type=float, default=2.0)
    parser.add_argument("--mixup", type=float, default=0.2)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--drop-path", type=float, default=0.1)
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--model-ema", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", default="./output")
    given, rest = config_parser.parse_known_args()
    if given.config:
        with open(given.config) as f:
            parser.set_defaults(**json.load(f))
    args = parser.parse_args(rest)
    return args, json.dumps(vars(args), indent=1)


def main():
    logging.basicConfig(level=logging.INFO)
    args, args_text = parse_args()
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")
    torch.manual_seed(42)
    model = create_model(args.model, num_classes=10, drop_rate=args.drop_path)
    _logger.info(f"Model {args.model} created, param count:{sum(m.numel() for m in model.parameters())}")
    model.to(device=device)
    optimizer = torch.optim.SGD(add_weight_decay(model, 2e-5), lr=args.lr, momentum=0.9, nesterov=True)
    amp_autocast, loss_scaler = suppress, None
    if args.amp:
        amp_autocast, loss_scaler = lambda: torch.autocast(device_type="cuda", dtype=torch.float16), NativeScaler()
    model_ema = ModelEma(model, 0.9998) if args.model_ema else None
    loader = DataLoader(FakeImages(320, args.img_size), args.batch_size, shuffle=True, num_workers=4, pin_memory=True, drop_last=True)
    mixup_fn = Mixup(args.mixup, 10, args.smoothing) if args.mixup else None
    train_loss = (SoftTargetCrossEntropy() if mixup_fn else nn.CrossEntropyLoss(label_smoothing=args.smoothing)).to(device=device)
    folder = os.path.join(args.output, time.strftime("%Y%m%d-%H%M%S"))
    saver = CheckpointSaver(folder)
    with open(os.path.join(folder, "args.json"), "w") as f:
        f.write(args_text)
    for epoch in range(args.epochs):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * epoch / args.epochs))
        metrics = train_one_epoch(epoch, model, loader, optimizer, train_loss, args, device, amp_autocast, loss_scaler, model_ema, mixup_fn)
        saver.save(model, optimizer, epoch, -metrics["loss"])


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, device, amp_autocast, loss_scaler, model_ema, mixup_fn):
    losses = AverageMeter()
    model.train()
    for batch_idx, (input, target) in enumerate(loader):
        input, target = input.to(device), target.to(device)
        if mixup_fn is not None:
            input, target = mixup_fn(input, target)
        with amp_autocast():
            output = model(input)
            loss = loss_fn(output, target)
        losses.update(loss.item(), input.size(0))
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip_grad, parameters=model.parameters())
        else:
            loss.backward()
            optimizer.step()
        if model_ema is not None:
            model_ema.update(model)
        torch.cuda.synchronize()
        if batch_idx % 50 == 0:
            _logger.info(f"Train: {epoch} [{batch_idx:>4d}/{len(loader)}] Loss: {losses.avg:#.3g}")
    return OrderedDict([("loss", losses.avg)])


if __name__ == "__main__":
    main()
