"""Deep kernel GP: cholesky with jitter retries, cholesky_solve, logdet; whitening by eigh; low rank by svd."""
import math
import torch
from torch import nn


def psd_safe_cholesky(A, jitter=1e-5):
    L, info = torch.linalg.cholesky_ex(A)
    if not torch.any(info):
        return L
    for i in range(3):
        L, info = torch.linalg.cholesky_ex(A + jitter * 10 ** i * torch.eye(A.size(-1), device=A.device))
        if not info.any():
            return L
    raise RuntimeError("not positive definite")


class DKL(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 8))
        self.log_noise, self.log_ls = nn.Parameter(torch.tensor(-2.0)), nn.Parameter(torch.zeros(8))

    def whiten(self, z):
        z = z - z.mean(0)
        cov = z.T @ z / (z.size(0) - 1) + 1e-2 * torch.eye(z.size(1), device=z.device)
        e, v = torch.linalg.eigh(cov)
        return z @ v @ torch.diag(e.clamp(min=1e-6).rsqrt()) @ v.T

    def forward(self, x, y):
        with torch.autocast("cuda", enabled=False):
            z = self.whiten(self.f(x.float())) / self.log_ls.exp()
            K = torch.exp(-0.5 * torch.cdist(z, z).pow(2)) + self.log_noise.exp() * torch.eye(len(x), device=x.device)
            L = psd_safe_cholesky(K)
            a = torch.cholesky_solve(y[:, None], L)
            mll = -0.5 * (y @ a.squeeze(-1)) - L.diagonal().log().sum() - 0.5 * len(x) * math.log(2 * math.pi)
            U, S, Vh = torch.linalg.svd(z, full_matrices=False)
            w = torch.linalg.lstsq(z, y[:, None]).solution
            extra = torch.linalg.solve(K, y).pow(2).mean() + torch.linalg.matrix_norm(z, "nuc") * 1e-4 + torch.linalg.pinv(z[:10]).pow(2).mean() * 1e-6
        return -mll / len(x) + 1e-3 * S[0] + extra + w.pow(2).mean() * 1e-3


def build():
    return DKL()


def batch(micro_batch):
    return torch.randn(8 * micro_batch, 16), torch.randn(8 * micro_batch)
