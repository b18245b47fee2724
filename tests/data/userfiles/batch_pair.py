"""weight_norm (old and new), orthogonal, custom parametrization with right_inverse, pruning mask."""
import torch
from torch import nn
import torch.nn.utils.parametrize as P
import torch.nn.utils.prune as prune
from torch.nn.utils.parametrizations import orthogonal, weight_norm, spectral_norm


class Symmetric(nn.Module):
    def forward(self, X):
        return X.triu() + X.triu(1).transpose(-1, -2)

    def right_inverse(self, A):
        return A.triu()


class Net(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.a = weight_norm(nn.Linear(d, d))
        self.b = orthogonal(nn.Linear(d, d), orthogonal_map="cayley")
        self.c = spectral_norm(nn.Conv1d(1, 4, 3, padding=1), n_power_iterations=2)
        self.d = nn.Linear(d, d)
        P.register_parametrization(self.d, "weight", Symmetric())
        self.e = nn.Linear(4 * d, 10)
        prune.l1_unstructured(self.e, "weight", amount=0.3)
        self.old = torch.nn.utils.weight_norm(nn.Conv1d(4, 4, 1))

    def forward(self, x):
        h = torch.relu(self.a(x))
        with P.cached():
            h = self.d(self.d(self.b(h)))
        h = self.old(self.c(h.unsqueeze(1)))
        return self.e(h.flatten(1))


def build():
    return Net()


def batch(micro_batch):
    return torch.randn(micro_batch, 64), torch.randint(0, 10, (micro_batch,))


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])
