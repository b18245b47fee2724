import torch
from torch import nn
from torch.func import jacrev, hessian, vmap, functional_call, grad_and_value
from torch.nn.utils import parameters_to_vector, vector_to_parameters
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.f = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        v = parameters_to_vector(self.f.parameters()); vector_to_parameters(v * 0.5, self.f.parameters())
    def forward(self, x):
        J = vmap(jacrev(lambda y: self.f(y)))(x)
        H = vmap(hessian(lambda y: self.f(y).squeeze()))(x)
        return J.mean() + H.diagonal(dim1=1, dim2=2).sum()
def build(): return Net()
def batch(micro_batch): return torch.randn(micro_batch, 4)
