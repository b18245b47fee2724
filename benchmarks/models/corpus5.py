"""Models of the corpus that find things in pictures, fields and losses with gradients inside, and libraries' models that are no classifiers.

Every function returns a model and one batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from model_parts import Built, Lambda, Residual, WithLoss, conv, labelled, mlp, pictures
from torch import Tensor, nn

# ---------------------------------------------------------------------- what is where in pictures


class _Detector(nn.Module):
    """A pyramid, heads shared by its levels, focal loss and boxes."""

    def __init__(self, base: int, classes: int) -> None:
        super().__init__()
        self.downs = nn.ModuleList(
            (
                nn.Sequential(conv(3, base, 7, 4), conv(base, 2 * base, 3, 2)),
                conv(2 * base, 4 * base, 3, 2),
                conv(4 * base, 8 * base, 3, 2),
            )
        )
        self.sides = nn.ModuleList(nn.Conv2d(base * k, 128, 1) for k in (2, 4, 8))
        self.kinds, self.boxes = (
            nn.Sequential(
                *(nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.GroupNorm(8, 128), nn.ReLU()) for _ in range(3)),
                nn.Conv2d(128, 9 * k, 3, padding=1),
            )
            for k in (classes, 4)
        )

    def forward(self, x: Tensor, kind: Tensor, box: Tensor) -> Tensor:
        levels: list[Tensor] = []
        for down, side in zip(self.downs, self.sides, strict=True):
            x = down(x)
            levels.append(side(x))
        for n in (1, 0):
            levels[n] = levels[n] + F.interpolate(levels[n + 1], scale_factor=2.0, mode="nearest")
        scores = torch.cat(
            [self.kinds(level).permute(0, 2, 3, 1).reshape(x.shape[0], -1, kind.shape[-1]) for level in levels], 1
        ).float()
        found = torch.cat(
            [self.boxes(level).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4) for level in levels], 1
        ).float()
        hit = torch.sigmoid(scores)
        focal = F.binary_cross_entropy_with_logits(scores, kind.float(), reduction="none") * torch.where(
            kind > 0, 0.25 * (1 - hit) ** 2, 0.75 * hit**2
        )
        return focal.sum() / 100 + F.smooth_l1_loss(found, box.float())


def focal_detector(micro_batch: int, image: int = 256, base: int = 48, classes: int = 20) -> Built:
    count = 9 * sum((image // k) ** 2 for k in (8, 16, 32))
    return _Detector(base, classes), {
        "x": pictures(micro_batch, image),
        "kind": (torch.rand(micro_batch, count, classes) < 0.01).float(),
        "box": torch.randn(micro_batch, count, 4),
    }


class _Centres(nn.Module):
    def __init__(self, base: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            conv(3, base, 7, 2), conv(base, 2 * base, 3, 2), *(Residual(conv(2 * base, 2 * base)) for _ in range(4))
        )
        self.heat, self.size = (nn.Sequential(conv(2 * base, 64), nn.Conv2d(64, k, 1)) for k in (20, 2))

    def forward(self, x: Tensor, heat: Tensor, where: Tensor, size: Tensor) -> Tensor:
        x = self.net(x)
        found, wide = torch.sigmoid(self.heat(x).float()).clamp(1e-4, 1 - 1e-4), self.size(x).flatten(2)
        loss = torch.where(heat > 0.99, (1 - found) ** 2 * found.log(), (1 - heat) ** 4 * found**2 * (1 - found).log())
        taken = wide.gather(2, where.unsqueeze(1).expand(-1, 2, -1))
        return F.l1_loss(taken.float(), size.float()) - loss.sum() / 100


def centre_points(micro_batch: int, image: int = 256, base: int = 48) -> Built:
    side = image // 4
    return _Centres(base), {
        "x": pictures(micro_batch, image),
        "heat": torch.rand(micro_batch, 20, side, side),
        "where": torch.randint(side * side, (micro_batch, 50)),
        "size": torch.rand(micro_batch, 2, 50),
    }


class _Flow(nn.Module):
    """All pairs of two pictures' features, looked up around a flow that a recurrent unit moves."""

    def __init__(self, wide: int, rounds: int) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(3, 64, 7, 2), conv(64, 96, 3, 2), conv(96, wide, 3, 2))
        self.gates, self.new, self.move, self.rounds = (
            nn.Conv2d(wide + 11, 2 * wide, 3, padding=1),
            nn.Conv2d(wide + 11, wide, 3, padding=1),
            nn.Conv2d(wide, 2, 3, padding=1),
            rounds,
        )

    def forward(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        a, b = self.net(x), self.net(z)
        n, c, h, w = a.shape
        pairs = (a.flatten(2).transpose(1, 2) @ b.flatten(2) / c**0.5).view(n * h * w, 1, h, w).float()
        rows, columns = torch.meshgrid(
            torch.arange(h, device=x.device), torch.arange(w, device=x.device), indexing="ij"
        )
        grid = torch.stack([columns, rows], -1).float()
        reach = torch.tensor([[i, j] for i in (-1, 0, 1) for j in (-1, 0, 1)], device=x.device, dtype=torch.float32)
        flow, state, loss = torch.zeros(n, h, w, 2, device=x.device), torch.tanh(a), 0.0
        for _ in range(self.rounds):
            at = (grid + flow).reshape(n * h * w, 1, 1, 2) + reach.view(1, 3, 3, 2)
            seen = F.grid_sample(pairs, 2 * at / max(h, w) - 1, align_corners=True).view(n, h, w, 9).permute(0, 3, 1, 2)
            both = torch.cat([seen.to(state.dtype), flow.permute(0, 3, 1, 2).to(state.dtype)], 1)
            keep, open_ = torch.sigmoid(self.gates(torch.cat([state, both], 1))).chunk(2, 1)
            state = (1 - keep) * state + keep * torch.tanh(self.new(torch.cat([open_ * state, both], 1)))
            flow = flow.detach() + self.move(state).permute(0, 2, 3, 1).float()
            loss = loss + (flow - y).abs().mean()
        return loss


def optical_flow(micro_batch: int, image: int = 192, wide: int = 96, rounds: int = 6) -> Built:
    side = image // 8
    return _Flow(wide, rounds), {
        "x": pictures(micro_batch, image),
        "z": pictures(micro_batch, image),
        "y": torch.randn(micro_batch, side, side, 2),
    }


class _Turned(nn.Module):
    def __init__(self, base: int) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(3, 32, 7, 2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(32, 32, 5),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 6),
        )
        self.net = nn.Sequential(
            conv(3, base),
            conv(base, 2 * base, 3, 2),
            conv(2 * base, 4 * base, 3, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * base, 43),
        )

    def forward(self, x: Tensor) -> Tensor:
        turn = self.look(x).view(-1, 2, 3).float()
        return self.net(
            F.grid_sample(x.float(), F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)
        )


def spatial_transformer(micro_batch: int, image: int = 64, base: int = 64) -> Built:
    return WithLoss(_Turned(base)), labelled(pictures(micro_batch, image), 43)


class _Capsules(nn.Module):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.first, self.second, self.rounds = nn.Conv2d(1, 128, 9), nn.Conv2d(128, 128, 9, 2), rounds
        self.votes = nn.Parameter(0.02 * torch.randn(10, 16 * 36, 8, 16))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        size = (x**2).sum(-1, keepdim=True)
        return x * size / (1 + size) / (size + 1e-6).sqrt()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = self.squash(self.second(F.relu(self.first(x))).reshape(x.shape[0], -1, 8).float())
        votes = torch.einsum("bnd,knde->bkne", parts, self.votes)
        logits = torch.zeros(votes.shape[:3], device=x.device)
        for n in range(self.rounds):
            found = self.squash((torch.softmax(logits, 1).unsqueeze(-1) * votes).sum(2))
            logits = logits + (votes * found.unsqueeze(2)).sum(-1) if n < self.rounds - 1 else logits
        size, goal = found.norm(dim=-1), F.one_hot(y, 10).float()
        return (goal * F.relu(0.9 - size) ** 2 + 0.5 * (1 - goal) * F.relu(size - 0.1) ** 2).sum(1).mean()


def capsule_net(micro_batch: int, rounds: int = 3) -> Built:
    return _Capsules(rounds), labelled(torch.rand(micro_batch, 1, 28, 28), 10)


class _Rain(nn.Module):
    """A convolutional LSTM over frames."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.gates, self.last, self.wide = (
            nn.Conv2d(1, wide, 3, 2, 1),
            nn.Conv2d(2 * wide, 4 * wide, 5, padding=2),
            nn.ConvTranspose2d(wide, 1, 4, 2, 1),
            wide,
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = self.first(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        h = c = torch.zeros_like(seen[:, 0])
        found = []
        for part in seen.unbind(1):
            i, f, o, g = self.gates(torch.cat([part, h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            found.append(h)
        return self.last(torch.stack(found, 1).flatten(0, 1)).unflatten(0, x.shape[:2])


def conv_lstm(micro_batch: int, image: int = 64, wide: int = 64, frames: int = 10) -> Built:
    return WithLoss(_Rain(wide), "numbers"), {name: torch.rand(micro_batch, frames, 1, image, image) for name in "xy"}


class _Student(nn.Module):
    def __init__(self, base: int) -> None:
        super().__init__()
        self.teacher, self.student = (
            nn.Sequential(
                conv(3, k, 3, 2),
                *(conv(k, k) for _ in range(4)),
                conv(k, 2 * k, 3, 2),
                *(conv(2 * k, 2 * k) for _ in range(4)),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(2 * k, 100),
            )
            for k in (3 * base, base)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            told = self.teacher(x).float()
        found = self.student(x).float()
        return F.cross_entropy(found, y) + F.kl_div(
            F.log_softmax(found / 4, 1), F.softmax(told / 4, 1), reduction="batchmean"
        )


def distilled_net(micro_batch: int, image: int = 96, base: int = 48) -> Built:
    return _Student(base), labelled(pictures(micro_batch, image), 100)


def local_patches(micro_batch: int, image: int = 64, wide: int = 64) -> Built:
    """Convolutions written as unfold and a product, and pooling by sorted values."""

    def local(x: Tensor) -> Tensor:
        return F.unfold(x, 3, padding=1).view(x.shape[0], -1, *x.shape[2:])

    net = nn.Sequential(nn.Conv2d(3, wide, 3, 2, 1),
                        *(nn.Sequential(Lambda(local), nn.Conv2d(9 * wide, wide, 1), nn.BatchNorm2d(wide), nn.ReLU()) for _ in range(4)),
                        Lambda(lambda x: x.flatten(2).sort(dim=2)[0][..., -64:].mean(2)), nn.Linear(wide, 100))  # fmt: skip
    return WithLoss(net), labelled(pictures(micro_batch, image), 100)


# ---------------------------------------------------------------------- fields, and gradients inside the loss


class _Rays(nn.Module):
    """Colour and density along rays, added up."""

    def __init__(self, wide: int, hashed: bool) -> None:
        super().__init__()
        self.hashed = hashed
        self.tables = nn.ModuleList(nn.Embedding(2**17, 2) for _ in range(12)) if hashed else None
        self.net, self.colour = mlp(24 if hashed else 63, wide, wide, wide, wide), mlp(wide + 3, wide // 2, 3)
        self.dense = nn.Linear(wide, 1)
        self.register_buffer("primes", torch.tensor([1, 2_654_435_761, 805_459_861]))

    def known(self, x: Tensor) -> Tensor:
        if self.tables is None:
            angles = torch.cat([x * 2.0**n for n in range(10)], -1)
            return torch.cat([x, angles.sin(), angles.cos()], -1)
        found = []
        for n, table in enumerate(self.tables):
            scaled = x * 16 * 1.4**n
            low = scaled.floor()
            part = (scaled - low).prod(-1, keepdim=True)
            cells = [((low.long() + k) * self.primes).sum(-1) % 2**17 for k in (0, 1)]
            found.append(table(cells[0]) * (1 - part) + table(cells[1]) * part)
        return torch.cat(found, -1)

    def forward(self, x: Tensor, way: Tensor, y: Tensor) -> Tensor:
        far = torch.linspace(0.1, 4, 64, device=x.device)
        points = x.unsqueeze(1) + way.unsqueeze(1) * far.view(1, -1, 1)
        h = self.net(self.known(points))
        clear = torch.exp(-F.softplus(self.dense(h).float().squeeze(-1)) * 0.06)
        light = torch.cumprod(torch.cat([torch.ones_like(clear[:, :1]), clear[:, :-1]], 1), 1) * (1 - clear)
        colour = torch.sigmoid(self.colour(torch.cat([h, way.unsqueeze(1).expand_as(points).to(h.dtype)], -1)).float())
        return F.mse_loss((light.unsqueeze(-1) * colour).sum(1), y)


def radiance_field(micro_batch: int, wide: int = 256) -> Built:
    return _Rays(wide, False), {name: torch.rand(micro_batch, 3) for name in ("x", "way", "y")}


def hashed_field(micro_batch: int, wide: int = 64) -> Built:
    return _Rays(wide, True), {name: torch.rand(micro_batch, 3) for name in ("x", "way", "y")}


class _Heat(nn.Module):
    """A solution whose derivatives are in the loss."""

    def __init__(self, wide: int, layers: int) -> None:
        super().__init__()
        self.net = mlp(2, *(wide for _ in range(layers)), 1, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (first[:, 1] + u.squeeze(1) * first[:, 0] - 0.01 * second[:, 0]).pow(2).mean().float()


def heat_equation(micro_batch: int, wide: int = 256, layers: int = 5) -> Built:
    return _Heat(wide, layers), {"x": torch.rand(micro_batch, 2)}


class _Penalty(nn.Module):
    def __init__(self, base: int) -> None:
        super().__init__()
        self.make = nn.Sequential(
            nn.Linear(64, 4 * base * 64),
            nn.ReLU(),
            nn.Unflatten(1, (4 * base, 8, 8)),
            nn.ConvTranspose2d(4 * base, base, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(base, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.judge = nn.Sequential(
            nn.Conv2d(3, base, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(base, 2 * base, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * base * 64, 1),
        )

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        made = self.make(z)
        between = (0.5 * x + 0.5 * made.detach().to(x.dtype)).requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()
        return (
            self.judge(made.detach()).mean() - self.judge(x).mean() - self.judge(made).mean() + 10 * penalty
        ).float()


def gradient_penalty(micro_batch: int, base: int = 64) -> Built:
    return _Penalty(base), {"x": torch.rand(micro_batch, 3, 32, 32), "z": torch.randn(micro_batch, 64)}


# ---------------------------------------------------------------------- libraries' layers that take no classifier's batch


def _graph(kind: str, micro_batch: int, nodes: int, dim: int, **more: Any) -> Built:
    """Three layers of torch_geometric over one random graph."""
    from torch_geometric import nn as layers

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = getattr(layers, kind)
            wrap = (lambda a, b: mlp(a, b, b)) if kind == "GINConv" else None
            self.convs = nn.ModuleList(
                made(wrap(a, b)) if wrap else made(a, b, **more) for a, b in ((128, dim), (dim, dim), (dim, dim))
            )
            self.head = nn.Linear(dim, 32)

        def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
            for layer in self.convs:
                x = F.relu(layer(x, edges))
            return F.cross_entropy(self.head(x).float(), y)

    nodes = nodes * micro_batch
    return Net(), {
        "x": torch.randn(nodes, 128),
        "edges": torch.randint(nodes, (2, 10 * nodes)),
        "y": torch.randint(32, (nodes,)),
    }


def pyg_gin(micro_batch: int, nodes: int = 5000, dim: int = 128) -> Built:
    return _graph("GINConv", micro_batch, nodes, dim)


def pyg_sage(micro_batch: int, nodes: int = 5000, dim: int = 128) -> Built:
    return _graph("SAGEConv", micro_batch, nodes, dim)


def pyg_transformer(micro_batch: int, nodes: int = 5000, dim: int = 128) -> Built:
    return _graph("TransformerConv", micro_batch, nodes, dim, heads=4, concat=False)


class _Mapped(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x)["out"].float(), y)


def _segmented(name: str, micro_batch: int, image: int) -> Built:
    from torchvision.models import get_model

    net = get_model(name, weights=None, weights_backbone=None, num_classes=21)
    return _Mapped(net), {
        "x": torch.rand(micro_batch, 3, image, image),
        "y": torch.randint(21, (micro_batch, image, image)),
    }


def deeplab_mobile(micro_batch: int, image: int = 224) -> Built:
    return _segmented("deeplabv3_mobilenet_v3_large", micro_batch, image)


def fcn_resnet(micro_batch: int, image: int = 224) -> Built:
    return _segmented("fcn_resnet50", micro_batch, image)


def _video(name: str, micro_batch: int, image: int) -> Built:
    from torchvision.models import get_model

    return WithLoss(get_model(name, weights=None, num_classes=101)), labelled(
        torch.rand(micro_batch, 3, 16, image, image), 101
    )


def video_r3d(micro_batch: int, image: int = 112) -> Built:
    return _video("r3d_18", micro_batch, image)


def video_mc3(micro_batch: int, image: int = 112) -> Built:
    return _video("mc3_18", micro_batch, image)


def video_swin(micro_batch: int, image: int = 112) -> Built:
    return _video("swin3d_t", micro_batch, image)
