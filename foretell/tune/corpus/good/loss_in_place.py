"""Task: loss. The gradient is made in the forward, of the logits alone, as fused losses do."""

import torch
from torch import nn


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        wide = logits.float()
        counts = target != -1
        total = counts.sum()
        place = target.clamp_min(0).unsqueeze(-1)
        loss = torch.logsumexp(wide, -1) - wide.gather(-1, place).squeeze(-1)
        share = torch.softmax(wide, -1)
        share.scatter_add_(-1, place, torch.full_like(place, -1, dtype=share.dtype))
        ctx.save_for_backward((torch.where(counts.unsqueeze(-1), share, 0) / total).to(logits.dtype))
        return (torch.where(counts, loss, 0).sum() / total).to(logits.dtype)

    @staticmethod
    def backward(ctx, grad):
        (share,) = ctx.saved_tensors
        return grad * share, None


class ModelNew(nn.Module):
    def forward(self, logits, target):
        return Function.apply(logits, target)
