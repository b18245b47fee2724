"""Experts with a capacity: one_hot, cumsum positions, dispatch by einsum and by sorted tokens."""
import torch
import torch.nn.functional as F
from torch import nn


class Switch(nn.Module):
    def __init__(self, d=64, experts=4, factor=1.25):
        super().__init__()
        self.router, self.experts, self.factor = nn.Linear(d, experts), nn.ModuleList([nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d)) for _ in range(experts)]), factor

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = self.router(flat).softmax(-1)
        gate, choice = probs.max(-1)
        capacity = int(self.factor * flat.size(0) / len(self.experts))
        counts = torch.stack([(choice == i).sum() for i in range(len(self.experts))])
        groups = [torch.eq(choice, i).nonzero(as_tuple=True)[0] for i in range(len(self.experts))]
        out, dropped = flat.new_zeros(flat.shape), []
        for i, expert in enumerate(self.experts):
            if len(groups[i]) > capacity:
                order = groups[i][torch.randperm(len(groups[i]))]
                dropped.append(order[capacity:])
                groups[i] = order[:capacity]
            out[groups[i], :] = expert(flat[groups[i], :])
        if dropped:
            dropped = torch.cat(dropped)
            out[dropped, :] = flat[dropped, :]
        order = choice.argsort()
        sizes = torch.bincount(choice, minlength=len(self.experts)).cpu().tolist()
        again = torch.cat([e(part) for e, part in zip(self.experts, flat[order].split(sizes))])
        balance = (counts.float() / flat.size(0) * probs.mean(0)).sum() * len(self.experts)
        return (out * gate[:, None]).view_as(x).pow(2).mean() + again.mean() + 0.01 * balance


def build():
    return Switch()


def batch(micro_batch):
    return torch.randn(micro_batch, 64, 64)
