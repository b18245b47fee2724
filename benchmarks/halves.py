"""What a backward in two halves costs the host (`torch.distributed.pipelining`), beside a whole one: stages of small blocks.

    python benchmarks/halves.py [--device cuda]      prints milliseconds of the host for whole, inputs' half and weights' half

2026-11-17, blocks in a stage → weights' half over whole: Arm core, torch 2.13: 2 → 1.8, 4 → 2.0, 8 → 2.5 to 3.5; x86 host of an H200, torch
2.11: 2 → 1.9 to 2.1, 4 → 2.3 to 2.5, 8 → 3.5; launching on the H200: 2 → 1.5, 4 → 3.1, 8 → 2.8. Inputs' half: 0.8 to 1.2.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

WIDTH, TOKENS, HEADS = 64, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).view(1, TOKENS, HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, TOKENS, WIDTH))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def whole(net: nn.Module, x: Tensor) -> float:
    given = x.clone().requires_grad_()
    out = net(given)
    begun = time.perf_counter()
    stage_backward(out, torch.ones_like(out), [given])
    return time.perf_counter() - begun


def halves(net: nn.Module, x: Tensor) -> tuple[float, float]:
    given = x.clone().requires_grad_()
    out = net(given)
    begun = time.perf_counter()
    _, groups = stage_backward_input([out], [torch.ones_like(out)], [given], net.parameters())
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    stage_backward_weight(net.parameters(), groups)
    return first, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    x = torch.randn(1, TOKENS, WIDTH, device=device)
    for blocks in (2, 4, 8):
        net = nn.Sequential(*[Block() for _ in range(blocks)]).to(device)
        for _ in range(5):
            whole(net, x), halves(net, x)
        plain = statistics.median(whole(net, x) for _ in range(30))
        both = [halves(net, x) for _ in range(30)]
        first, second = (statistics.median(one[half] for one in both) for half in (0, 1))
        print(f"{blocks} blocks: whole {plain * 1e3:.2f} ms, inputs {first / plain:.2f}, weights {second / plain:.2f} of it", flush=True)


if __name__ == "__main__":
    main()
