"""More operators: what moves, transforms and factors data, chance, and constructs that are more than one op. Plain data."""

from __future__ import annotations

from foretell.prove.fuzz.table import (
    ATTENTION,
    CONVOLUTIONS,
    ELEMENTWISE,
    FLAG,
    INDEXING,
    NORMS,
    POOLING,
    PRODUCTS,
    REDUCTIONS,
    make,
)
from foretell.prove.fuzz.types import Operator

MOVES = [
    make("view", "reshape", "{0}.reshape({1})", "f s", weight=2.5),
    make("view", "permute", "{0}.permute({order})", "f234", order="order", weight=2),
    make("view", "transpose", "{0}.transpose({dim}, {other})", "f234", dim="axis", other="axis", weight=1.5),
    make("view", "expand", "{0}.expand({1})", "f s"),
    make("view", "broadcast_sum", "{0}.unsqueeze(0).expand(3, *{0}.shape).contiguous()", "f123"),
    make("view", "unsqueeze", "{0}.unsqueeze({dim})", "f123", dim="axis"),
    make("view", "squeeze", "{0}.squeeze({dim})", dim="axis", weight=0.5),
    make("view", "narrow", "{0}.narrow({dim}, {start}, {n})", dim="axis", start=(0, 1, 2), n="size"),
    make("view", "select", "{0}.select({dim}, {start})", "f234", dim="axis", start=(0, 1)),
    make("view", "steps", "{0}[..., ::2]"),
    make("view", "view_of_view", "{0}.transpose(-1, -2)[..., 1:, :].unsqueeze(-1).flatten(-2)", "f234"),
    make("view", "flatten", "{0}.flatten({dim})", "f234", dim="axis"),
    make("view", "chunk", "{0}.chunk(2, {dim})", dim="axis", weight=1.5),
    make("view", "split", "torch.split({0}, [{n}, {m}], {dim})", dim="axis", n="size", m="size"),
    make("view", "unbind", "torch.unbind({0}.narrow({dim}, 0, 2), {dim})", "f234", dim="axis"),
    make("view", "windows", "{0}.unfold({dim}, {k}, {step})", "f123", dim="axis", k=(2, 3), step=(1, 2)),
    make("view", "diagonal", "torch.diagonal({0}, dim1=-2, dim2=-1)", "f234"),
    make("view", "contiguous", "{0}.transpose(0, -1).contiguous()", "f234"),
    make("move", "cat", "torch.cat([{0}, {1}], {dim})", "f f", dim="axis", weight=2),
    make("move", "cat_self", "torch.cat([{0}, -{0}, {0}.tanh()], {dim})", dim="axis"),
    make("move", "stack", "torch.stack([{0}, {1}], {dim})", "f123 f123", dim="axis", weight=1.5),
    make("move", "roll", "torch.roll({0}, {by}, {dim})", dim="axis", by=(1, -2)),
    make("move", "flip", "torch.flip({0}, ({dim},))", dim="axis"),
    make("move", "rot90", "torch.rot90({0}, 1, (0, 1))", "f234"),
    make("move", "pad", "F.pad({0}, ({by}, 1))", by=(0, 2, -1)),
    make("move", "pad_reflect", "F.pad({0}, (1, {by}), mode='reflect')", "f23", by=(0, 2)),
    make("move", "pad_replicate", "F.pad({0}, (1, {by}, 1, 0), mode='replicate')", "f34", by=(0, 2)),
    make("move", "tril", "torch.tril({0})", "f234"),
    make("move", "triu", "torch.triu({0}, 1)", "f234"),
    make("move", "diag_embed", "torch.diag_embed({0})", "f12", most=1 << 10),
    make("move", "repeat", "{0}.repeat({1})", "f s", most=1 << 14),
    make("move", "repeat_interleave", "{0}.repeat_interleave(2, {dim})", dim="axis"),
    make("move", "masked_softmax", "torch.softmax({0}.masked_fill(torch.ones_like({0}, dtype=torch.bool).triu(1), -1e4), -1)", "f234"),
    make("move", "diff", "torch.diff({0}, dim={dim})", dim="axis"),
    make("move", "meshgrid", "torch.meshgrid({0}, {1}, indexing='ij')[0]", "f1 f1"),
]
TRANSFORMS = [
    make("fft", "rfft", "torch.fft.rfft({0}, dim={dim}, norm='ortho')", dim="axis", weight=2),
    make("fft", "rfft_abs", "torch.fft.rfft({0}, norm='ortho').abs()"),
    make("fft", "fft_ifft", "torch.fft.ifft(torch.fft.fft({0}, dim={dim}) * 0.5, dim={dim}).real", dim="axis"),
    make("fft", "rfft2", "torch.fft.irfft2(torch.fft.rfft2({0}, norm='ortho') * 0.5, s={0}.shape[-2:], norm='ortho')", "f234"),
    make("complex", "complex_abs", "{0}.abs()", "c", weight=3),
    make("complex", "complex_mul", "{0} * torch.complex({1}, {1})", "c p", weight=3),
    make("complex", "complex_add", "{0} + {1}", "c c", weight=3),
    make("complex", "complex_real", "{0}.real", "c", weight=3),
    make("complex", "as_real", "torch.view_as_real({0})", "c123", weight=3),
    make("complex", "irfft", "torch.fft.irfft({0}, norm='ortho')", "c", weight=3),
    make("complex", "as_complex", "torch.view_as_complex({0})", "f234", weight=1.5),
    make("complex", "polar", "torch.polar({0}.abs() + 1, {0}).real"),
    make("complex", "stft", "torch.stft({0}, 8, hop_length=4, window=torch.hann_window(8), return_complex=True).abs()", "f2", most=1 << 14),
]
_SPD = "{0} @ {0}.transpose(-1, -2) * 0.1 + torch.eye({0}.shape[-2])"
FACTORS = [
    make("linalg", "cholesky", f"torch.linalg.cholesky({_SPD})", "f23", most=1 << 13),
    make("linalg", "solve", f"torch.linalg.solve({_SPD}, {{0}})", "f23", most=1 << 13),
    make("linalg", "inv", f"torch.linalg.inv({_SPD})", "f23", most=1 << 13),
    make("linalg", "qr", "torch.linalg.qr({0} + 2 * torch.eye({0}.shape[-2], {0}.shape[-1]))[0]", "f23", most=1 << 12),
    make("linalg", "svd_values", "torch.linalg.svdvals({0})", "f23", most=1 << 12),
    make("linalg", "eigh_values", f"torch.linalg.eigvalsh({_SPD})", "f23", most=1 << 12),
    make("linalg", "slogdet", f"torch.linalg.slogdet({_SPD})[1]", "f23", most=1 << 13),
    make("linalg", "triangular", f"torch.linalg.solve_triangular(torch.linalg.cholesky({_SPD}), {{0}}, upper=False)", "f23", most=1 << 13),
    make("linalg", "matrix_power", "torch.linalg.matrix_power(torch.softmax({0}, -1), 3)", "f23"),
]
CHANCE = [
    make("chance", "dropout", "F.dropout({0}, 0.2)", weight=1.5),
    make("chance", "nn_dropout", "{layer}({0})", layer="nn.Dropout(0.1)"),
    make("chance", "dropout2d", "F.dropout2d({0}, 0.2)", "f4"),
    make("chance", "alpha_dropout", "F.alpha_dropout({0}, 0.1, training=True)"),
    make("chance", "noise", "{0} + 0.1 * torch.randn_like({0})"),
    make("chance", "bernoulli", "{0} * torch.bernoulli(torch.full_like({0}, 0.7))"),
    make("chance", "gumbel", "F.gumbel_softmax({0}, dim=-1)"),
]
HELPERS = {
    "Straight": '''
class Straight(torch.autograd.Function):
    """Rounds forward, lets gradients through."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return torch.round(x * 4) / 4 * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum_to_size(scale.shape)
''',
    "inner": '''
def inner(x, w):
    return torch.tanh(x * w) * torch.sigmoid(x)
''',
    "row": '''
def row(x):
    return torch.softmax(x, -1) * x.norm()
''',
    "Running": '''
class Running(nn.Module):
    """Takes a running mean away, and updates it."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.flatten(0, -2).mean(0), 0.1)
        return x - self.mean
''',
    "slope": '''
def slope(x, w):
    """How steep a function is: a gradient that is differentiated again."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = torch.tanh(x * w).sum()
        return torch.autograd.grad(y, x, create_graph=True)[0]
''',
    "unrolled": '''
def unrolled(x, w):
    for _ in range(3):
        x = x - 0.1 * torch.tanh(x * w)
    return x
''',
}
CONSTRUCTS = [
    make("construct", "custom_function", "Straight.apply({0}, {1})", "f p1", helper="Straight", weight=2),
    make("construct", "checkpoint", "checkpoint(inner, {0}, {1}, use_reentrant=False)", "f p1", helper="inner", weight=2),
    make("construct", "vmap", "torch.vmap(row)({0})", "f234", helper="row", weight=2),
    make("construct", "gradient", "slope({0}, {1})", "f p1", helper="slope"),
    make("construct", "unrolled", "unrolled({0}, {1})", "f p1", helper="unrolled"),
    make("construct", "running_buffer", "{layer}({0})", "f234", layer="Running({n})", n="size", helper="Running", weight=2),
    make("construct", "mean_buffer", "{0} + {1}.mul_(0.9).add_({0}.detach().mean(), alpha=0.1)", "f u1"),
    make("construct", "detach", "{0} - {0}.detach().mean()"),
    make("construct", "no_grad", "{0} * torch.sigmoid({1}.detach())", "f f"),
    make("in-place", "relu_", "F.relu_({0} + {1})", "f f"),
    make("in-place", "add_", "({0} * 1.5).add_({1})", "f f"),
    make("in-place", "clone_mul_", "{0}.clone().mul_({1})", "f f"),
    make("in-place", "fill_part", "torch.zeros_like({0}).copy_({0})"),
    make("in-place", "index_put_", "({0} * 1.0).index_put_(({1},), {2}, accumulate={add})", "f i1<s[0][0] f", add=FLAG),
    make("in-place", "masked_fill_", "({0} * 2).masked_fill_({1}, 0.0)", "f b"),
    make("in-place", "sigmoid_", "{0}.mul(2.0).sigmoid_()"),
]
OPERATORS: tuple[Operator, ...] = (
    *ELEMENTWISE, *REDUCTIONS, *PRODUCTS, *CONVOLUTIONS, *NORMS, *POOLING, *ATTENTION, *INDEXING, *MOVES, *TRANSFORMS,
    *FACTORS, *CHANCE, *CONSTRUCTS,
)  # fmt: skip
BY_NAME = {operator.name: operator for operator in OPERATORS}
KINDS = tuple(dict.fromkeys(operator.kind for operator in OPERATORS))
