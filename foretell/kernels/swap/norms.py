"""Modules that are a norm, found by what they compute.

torch's own are known by their forward. Anybody's is asked: its forward runs on a twin of the module with random parameters, in float64, on
inputs of several magnitudes, and must agree with the formula; the ops it ran must be those of a norm, so that nothing it does depends
on values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.kernels import layer_norm, rms_norm
from foretell.kernels.rows import DTYPES
from foretell.kernels.swap.gate import FLOAT32, NEVER, KernelGate
from foretell.kernels.swap.match import Forward, KernelMatch, does_nothing_else, twin_of

# ---------------------------------------------------------------- what autocast and eps are


def rms_norm_is_cast() -> bool:
    """From 2.12 on CUDA's autocast runs rms_norm in float32."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 12)


@functools.lru_cache(maxsize=64)
def default_eps(dtype: torch.dtype, device: str) -> float:
    """What `F.rms_norm` adds when it is told nothing: the smallest step of the format, or of the one it computes in, by release."""
    small = torch.full((64,), 2.0**-9, dtype=dtype, device=device)
    said = torch.nn.functional.rms_norm(small, (64,))[0].item()
    found = small[0].item() ** 2 * (said**-2 - 1)
    return min((torch.finfo(one).eps for one in (dtype, torch.float32)), key=lambda eps: abs(eps - found))


def default_epses() -> dict[str, dict[torch.dtype, float]]:
    """Device → format → eps: asked now, so that a forward has only to look."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {device: {dtype: default_eps(dtype, device) for dtype in (*DTYPES, torch.float64)} for device in devices}


def default_of(x: Tensor, epses: Mapping[str, Mapping[torch.dtype, float]]) -> float:
    """For a call that a gate takes: under autocast that is one in float32."""
    return epses[x.device.type][torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype]


# ---------------------------------------------------------------- torch's own


@dataclass(frozen=True)
class Norm:
    """What a norm computes, and where its parameters are."""

    how: str
    eps: float | None
    weight: str = "weight"
    offset: float = 0.0
    centred: bool = False
    """A LayerNorm."""
    own: bool = False
    """Torch's own, which autocast treats as one op."""

    @property
    def kernel(self) -> str:
        return "layer_norm" if self.centred else "rms_norm"

    @property
    def autocast(self) -> str:
        return FLOAT32 if self.own and (self.centred or rms_norm_is_cast()) else NEVER


def torch_norm(module: nn.Module) -> Norm | str | None:
    for kind, eps in ((nn.RMSNorm, "rms_norm"), (nn.LayerNorm, "layer_norm")):
        if isinstance(module, kind):
            if plain_forward(module) is not kind.forward:
                return f"a subclass of nn.{kind.__name__} with a forward of its own"
            if len(module.normalized_shape) != 1:
                return f"normalises over {len(module.normalized_shape)} dimensions"
            return Norm(f"nn.{kind.__name__}", module.eps, centred=eps == "layer_norm", own=True)
    return None


def plain_forward(module: nn.Module) -> Forward:
    return type(module).forward


def norm_of(module: nn.Module) -> Norm | str | None:
    """What norm a module is, why it is none though it looks like one, or nothing."""
    found = torch_norm(module)
    return asked_norm(module) if found is None else found


def find_norm(module: nn.Module) -> KernelMatch | str | None:
    found = norm_of(module)
    if found is None or isinstance(found, str):
        return found
    make = layer_forward if found.centred else rms_forward
    return KernelMatch(
        kernel=found.kernel, how=found.how, gate={"autocast": found.autocast}, forward=lambda gate: make(gate, plain_forward(module), found)
    )


def rms_forward(gate: KernelGate, plain: Forward, norm: Norm) -> Forward:
    epses, eps, offset, name = default_epses() if norm.eps is None else {}, norm.eps, norm.offset, norm.weight

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight = getattr(self, name)
        if gate.takes(x, weight):
            return rms_norm.rms_norm(x, weight, default_of(x, epses) if eps is None else eps, offset)
        return plain(self, x)

    return forward


def layer_forward(gate: KernelGate, plain: Forward, norm: Norm) -> Forward:
    eps = norm.eps or 0.0

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        if gate.takes(input, self.weight, self.bias):
            return layer_norm.layer_norm(input, self.weight, self.bias, eps)
        return plain(self, input)

    return forward


# ---------------------------------------------------------------- anybody's

NORM_OPS = {
    "pow", "mul", "square", "mean", "add", "rsqrt", "sqrt", "div", "reciprocal", "_to_copy", "view", "_unsafe_view", "sum", "expand", "clone",
    "detach", "alias", "linalg_vector_norm", "unsqueeze", "copy_", "rms_norm", "_fused_rms_norm",
}  # fmt: skip
MAGNITUDES = (1.0, 1e-3, 1e3)


class Ran(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def asked_norm(module: nn.Module) -> Norm | str | None:
    """A module without children, with one vector for a parameter, that takes a tensor."""
    if module._modules or module._buffers or type(module).__module__.startswith("torch."):
        return None
    mine = [(name, one) for name, one in module._parameters.items() if one is not None]
    if len(mine) != 1 or mine[0][1].dim() != 1:
        return None
    (name, weight) = mine[0]
    found = _asked(module, name, weight.shape[0]) if does_nothing_else(module) else "its forward does more than return"
    if isinstance(found, str):
        return found if "norm" in type(module).__name__.lower() else None
    eps, offset = found
    return Norm(f"{type(module).__name__} computes RMSNorm, eps {eps:g}" + (", 1 + weight" if offset else ""), eps, name, offset)


def _asked(module: nn.Module, name: str, width: int) -> tuple[float, float] | str:
    """eps and offset, or why it is no RMSNorm."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, generator=generator, dtype=torch.float64)
    twin = twin_of(module, _parameters={name: nn.Parameter(weight, requires_grad=False)})
    scalars = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2}
    left = {(eps, offset) for eps in scalars for offset in (0.0, 1.0)}
    for training in (True, False):
        twin.training = training
        for x in _inputs(width, generator):
            try:
                with torch.no_grad(), Ran() as ran:
                    y = plain_forward(module)(twin, x.clone())
            except Exception as error:
                return f"its forward on a twin raised {type(error).__name__}"
            if strange := ran.names - NORM_OPS:
                return f"runs {', '.join(sorted(strange))}, which no RMSNorm needs"
            if not isinstance(y, Tensor) or y.shape != x.shape:
                return "does not return a tensor like its input"
            left = {(eps, offset) for eps, offset in left if _close(y, rms_norm.reference(x, weight, eps, offset))}
    if len(left) != 1:
        return "does not compute RMSNorm" if not left else "its eps cannot be told"
    return left.pop()


def _inputs(width: int, generator: torch.Generator) -> Iterator[Tensor]:
    for magnitude in MAGNITUDES:
        for lead in ((3,), (2, 3)):
            yield magnitude * torch.randn(*lead, width, generator=generator, dtype=torch.float64)


def _close(y: Tensor, wanted: Tensor) -> bool:
    """In float32's precision: many compute there whatever they are given."""
    return bool((y.double() - wanted).norm() <= 1e-5 * wanted.norm())
