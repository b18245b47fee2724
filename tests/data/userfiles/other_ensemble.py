"""A functional ensemble with stack_module_state, and hooks that keep activations."""
import torch
from torch import nn
from torch.func import functional_call, stack_module_state


class Ensemble(nn.Module):
    def __init__(self, n=4, d=64):
        super().__init__()
        nets = [nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d)) for _ in range(n)]
        parameters, _ = stack_module_state(nets)
        self.stacked = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v) for k, v in parameters.items()})
        self.names = list(parameters)
        self.base = [nets[0].to("meta")]
        self.stem = nn.Linear(d, d)
        self.kept = {}
        self.stem.register_forward_hook(lambda m, i, o: self.kept.update(stem=o.detach().mean()))
        self.stem.register_full_backward_hook(lambda m, gi, go: None)

    def forward(self, x):
        x = self.stem(x)
        call = lambda p: functional_call(self.base[0], p, (x,))
        return torch.vmap(call, randomness="different")({k: self.stacked[k.replace(".", "_")] for k in self.names})


def build():
    return Ensemble()


def batch(micro_batch):
    return torch.randn(micro_batch, 64)


def loss(output, batch):
    return output.var(0).mean()
