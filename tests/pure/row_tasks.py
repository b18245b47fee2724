"""Row-wise modules of every kind that templates do, for the tests of what is written from them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.tune.search.rowwise.lowering import program_of
from foretell.tune.search.rowwise.program import RowProgram
from foretell.tune.verify.inside.graph import graph_of

WIDTH = 24


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class AddNorm(nn.Module):
    """With a weight below another module, a learned number, and what is added up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + 0.5
        total += y
        return self.inner(total) * self.scale, total


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


class Gates(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.gelu(x) * y, F.silu(y).clamp(-0.1, 0.5) + F.gelu(x, approximate="tanh")


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class Spread(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6), x.amax(-1)


class Logs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.logsumexp(x.abs() + x.sin(), -1), F.log_softmax(x * 2, -1)


class Chosen(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x > y, x * x, torch.minimum(x, y)).masked_fill(y > 1.5, 0.25) + F.leaky_relu(x) - F.relu(y) / 3


MODULES: dict[str, tuple[type[nn.Module], int]] = {
    "rms": (Rms, 1), "add and norm": (AddNorm, 2), "softmax": (Softmax, 1), "gates": (Gates, 2), "unit": (Unit, 1), "spread": (Spread, 1),
    "logs": (Logs, 1), "chosen": (Chosen, 2),
}  # fmt: skip
"""Name → module and how many inputs it takes."""


def drawn(name: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    kind, count = MODULES[name]
    return kind(), [torch.randn(3, 5, WIDTH, requires_grad=True) for _ in range(count)]


def program(module: nn.Module, inputs: Sequence[Any]) -> RowProgram:
    return program_of(graph_of(module, [one.detach() if isinstance(one, Tensor) else one for one in inputs]))


def made(text: str, module: nn.Module, folder: Path) -> nn.Module:
    """The candidate in a file, around a module like the given one."""
    path = folder / "candidate.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("row_candidate", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["row_candidate"] = loaded
    spec.loader.exec_module(loaded)
    found = type("Tuned", (type(module),), {"forward": loaded.ModelNew.forward})()
    found.load_state_dict(module.state_dict())
    return found


def gaps(module: nn.Module, other: nn.Module, inputs: Sequence[Tensor]) -> list[float]:
    """Largest difference of each output and each gradient, as a share of the largest value."""
    answers = []
    for one in (module, other):
        outputs = one(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        random = torch.Generator().manual_seed(1)
        back = [torch.randn(out.shape, generator=random).to(out.dtype) for out in outputs]
        answers.append([*outputs, *torch.autograd.grad(outputs, [*inputs, *one.parameters()], back)])
    assert [one.shape for one in answers[0]] == [one.shape for one in answers[1]]
    return [float((a - b).detach().abs().max() / a.detach().abs().max().clamp_min(1e-6)) for a, b in zip(*answers, strict=True)]


STUB = "from torch import nn\n\n\nclass Model(nn.Module):\n    pass\n"
