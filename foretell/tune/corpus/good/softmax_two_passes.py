"""Task: softmax. By chunks of columns, with a running maximum and a running sum; the backward from the output alone."""

import torch
from torch import nn

CHUNK = 16


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if not x.numel():
            return torch.empty_like(x)
        wide = x.float()
        highest = torch.full_like(wide[..., :1], float("-inf"))
        total = torch.zeros_like(highest)
        for part in wide.split(CHUNK, -1):
            higher = torch.maximum(highest, part.amax(-1, keepdim=True))
            total = total * torch.exp(highest - higher) + torch.exp(part - higher).sum(-1, keepdim=True)
            highest = higher
        out = (torch.exp(wide - highest) / total).to(x.dtype)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        wide, share = grad.float(), out.float()
        return (share * (wide - torch.linalg.vecdot(wide, share).unsqueeze(-1))).to(grad.dtype)


class ModelNew(nn.Module):
    def forward(self, x):
        return Function.apply(x)
