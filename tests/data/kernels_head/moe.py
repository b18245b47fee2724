"""A mixture of SwiGLU experts, two for each token."""

import torch
import torch.nn.functional as F
from torch import nn

from foretell.kernels.moe import moe


class Model(nn.Module):
    def __init__(self, width, inner, experts):
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, width) * width**-0.5)
        self.w_in = nn.Parameter(torch.randn(experts, 2 * inner, width) * width**-0.5)
        self.w_out = nn.Parameter(torch.randn(experts, width, inner) * inner**-0.5)

    def forward(self, x):
        share, index = F.linear(x, self.router).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for expert in range(len(self.w_in)):
            token, choice = torch.where(index == expert)
            gate, up = F.linear(x[token], self.w_in[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.w_out[expert]) * share[token, choice, None]
            out = out.index_add(0, token, made)
        return out


class ModelNew(nn.Module):
    def __init__(self, width, inner, experts):
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, width) * width**-0.5)
        self.w_in = nn.Parameter(torch.randn(experts, 2 * inner, width) * width**-0.5)
        self.w_out = nn.Parameter(torch.randn(experts, width, inner) * inner**-0.5)

    def forward(self, x):
        share, index = F.linear(x, self.router).softmax(-1).topk(2, -1)
        return moe(x, index, share, self.w_in, self.w_out)


def get_inputs():
    return [torch.randn(20, 16)]


def get_init_inputs():
    return [16, 12, 4]
