"""Modules a kernel can stand for, found by what they compute.

torch's own are known by their forward. Anybody's norm is asked: its forward runs on a copy of the module with small random parameters,
in float64, on inputs of several magnitudes, and must agree with the formula; the ops it ran must be those of a norm, so that nothing
it does depends on values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.kernels import rms_norm
from foretell.kernels.gate import KernelGate

Forward = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class KernelMatch:
    """A module and the kernel that can do its work."""

    kernel: str
    how: str
    """How it was recognised."""
    cast: bool
    """Of its gate."""
    forward: Callable[[KernelGate], Forward]
    """Makes the forward to be put in, a function of module and arguments."""


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
    return {device: {dtype: default_eps(dtype, device) for dtype in (*rms_norm.DTYPES, torch.float64)} for device in devices}


# ---------------------------------------------------------------- RMSNorm


def rms_forward(gate: KernelGate, plain: Forward, eps: float | None, offset: float, name: str) -> Forward:
    epses = default_epses() if eps is None else {}

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight = getattr(self, name)
        if gate.takes(x, weight):
            return rms_norm.rms_norm(x, weight, epses[x.device.type][x.dtype] if eps is None else eps, offset)
        return plain(self, x)

    return forward


def torch_rms_norm(module: nn.Module) -> KernelMatch | str | None:
    if not isinstance(module, nn.RMSNorm):
        return None
    if type(module).forward is not nn.RMSNorm.forward:
        return "a subclass of nn.RMSNorm with a forward of its own"
    if len(module.normalized_shape) != 1:
        return f"normalises over {len(module.normalized_shape)} dimensions"
    eps = module.eps
    return KernelMatch(
        kernel="rms_norm", how="nn.RMSNorm", cast=rms_norm_is_cast(),
        forward=lambda gate: rms_forward(gate, nn.RMSNorm.forward, eps, 0.0, "weight"),
    )  # fmt: skip


NORM_OPS = {
    "pow", "mul", "square", "mean", "add", "rsqrt", "sqrt", "div", "reciprocal", "_to_copy", "view", "_unsafe_view", "sum", "expand", "clone",
    "detach", "alias", "linalg_vector_norm", "unsqueeze", "copy_", "lift_fresh", "rms_norm", "_fused_rms_norm", "prims",
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


def asked_rms_norm(module: nn.Module) -> KernelMatch | str | None:
    """A module without children, with one vector for a parameter, that takes a tensor."""
    if next(module.children(), None) is not None or module._buffers or type(module).__module__.startswith("torch."):
        return None
    mine = [(name, one) for name, one in module._parameters.items() if one is not None]
    if len(mine) != 1 or mine[0][1].dim() != 1:
        return None
    name, weight = mine[0]
    scalars = {key: value for key, value in vars(module).items() if isinstance(value, float) and 0 < value < 1e-2}
    found = _asked(module, name, min(weight.shape[0], weight.shape[0]), scalars)
    if isinstance(found, str):
        return found if "norm" in type(module).__name__.lower() else None
    eps, offset = found
    plain = type(module).forward
    return KernelMatch(
        kernel="rms_norm", how=f"{type(module).__name__}, which computes RMSNorm with eps {eps:g}" + (" and 1 + weight" if offset else ""),
        cast=False, forward=lambda gate: rms_forward(gate, plain, eps, offset, name),
    )  # fmt: skip


def _asked(module: nn.Module, name: str, width: int, scalars: dict[str, float]) -> tuple[float, float] | str:
    """eps and offset, or why it is no RMSNorm."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, generator=generator, dtype=torch.float64)
    twin = twin_of(module, {name: nn.Parameter(weight, requires_grad=False)})
    left = {(eps, offset) for eps in {*scalars.values()} for offset in (0.0, 1.0)}
    for x in _inputs(width, generator):
        try:
            with torch.no_grad(), Ran() as ran:
                y = type(module).forward(twin, x.clone())
        except Exception as error:
            return f"its forward on a copy raised {type(error).__name__}"
        if strange := ran.names - NORM_OPS:
            return f"runs {', '.join(sorted(strange))}, which no RMSNorm needs"
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return "does not return a tensor like its input"
        # In float32 at least: many compute there whatever they are given.
        left = {(eps, offset) for eps, offset in left if _close(y, rms_norm.reference(x, weight, eps, offset))}
    if len(left) != 1:
        return "does not compute RMSNorm" if not left else "its eps cannot be told"
    return left.pop()


def _inputs(width: int, generator: torch.Generator) -> Iterator[Tensor]:
    for magnitude in MAGNITUDES:
        for lead in ((3,), (2, 3)):
            yield magnitude * torch.randn(*lead, width, generator=generator, dtype=torch.float64)


def _close(y: Tensor, wanted: Tensor) -> bool:
    return bool((y.double() - wanted).norm() <= 1e-5 * wanted.norm())


def twin_of(module: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """The module with other parameters: its class and settings, nothing that runs when it is called."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    vars(twin).update(
        _parameters=parameters, _forward_hooks={}, _forward_pre_hooks={}, _backward_hooks={}, _backward_pre_hooks={}, _buffers={}, _modules={}
    )
    return twin


FINDERS: tuple[Callable[[nn.Module], KernelMatch | str | None], ...] = (torch_rms_norm, asked_rms_norm)
"""Each answers with a match, with why a module that looks alike is left, or with nothing."""
