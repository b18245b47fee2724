"""Put kernels into a model, and take them out again.

    applied = apply(model)                      those measured to be faster on its device
    applied = apply(model, ["rms_norm"])        these, wherever they were verified
    print(applied); applied.revert()

The forward of a module is swapped, on the module and not on its class: modules, parameters, hooks and state dict stay what they are, so
that FSDP2 and torch.compile see the same model. Copies have the kernels too; a pickled model has its own forwards again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn

from foretell.errors import UserError
from foretell.kernels import catalog, match, measured
from foretell.kernels.gate import KernelGate
from foretell.kernels.kernel import TrainingKernel


@dataclass(frozen=True, kw_only=True)
class KernelSwap:
    """A module that has a kernel now."""

    module: str
    kernel: str
    how: str


@dataclass(frozen=True, kw_only=True)
class KernelLeft:
    """A module that could have been meant, and keeps its forward."""

    module: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What `apply` did."""

    swapped: tuple[KernelSwap, ...]
    left: tuple[KernelLeft, ...]
    modules: tuple[tuple[nn.Module, MethodType], ...]
    """Those swapped and what was put in."""

    def revert(self) -> None:
        """Give each module its own forward back; one that somebody has swapped since is theirs."""
        for module, put in self.modules:
            if vars(module).get("forward") is put:
                del module.forward

    def __str__(self) -> str:
        lines = [f"{one.module}: {one.kernel} ({one.how})" for one in self.swapped]
        lines += [f"{one.module}: left, {one.why}" for one in self.left]
        return "\n".join(lines) or "no module has a kernel"


def apply(model: nn.Module, names: Iterable[str] | None = None, *, anywhere: bool = False) -> Applied:
    """Swap the forwards of the modules the named kernels can stand for; without names, of kernels that are on by default.

    `anywhere` takes every shape, and a CPU, where the op runs its reference: for trials.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"kernels go into a torch module, and this is a {type(model).__name__}", "give the model itself")
    asked = None if names is None else {name: catalog.find(name) for name in names}
    swapped: list[KernelSwap] = []
    left: list[KernelLeft] = []
    put: list[tuple[nn.Module, MethodType]] = []
    for path, module in model.named_modules():
        said = _swapped(module, asked, anywhere)
        if isinstance(said, str):
            left.append(KernelLeft(module=path or "the model", why=said))
        elif said is not None:
            forward, found = said
            module.forward = forward
            put.append((module, forward))
            swapped.append(KernelSwap(module=path or "the model", kernel=found.kernel, how=found.how))
    return Applied(swapped=tuple(swapped), left=tuple(left), modules=tuple(put))


def _swapped(module: nn.Module, asked: dict[str, TrainingKernel] | None, anywhere: bool) -> tuple[MethodType, match.KernelMatch] | str | None:
    """The forward to be put in, why the module is left, or nothing."""
    for finder in match.FINDERS:
        found = finder(module)
        if found is None:
            continue
        if isinstance(found, str):
            return found
        if asked is not None and found.kernel not in asked:
            continue
        if "forward" in vars(module):
            return "its forward was replaced already"
        gate = _gate(found, module, asked is not None, anywhere)
        if isinstance(gate, str):
            return gate
        return MethodType(found.forward(gate), module), found
    return None


def _gate(found: match.KernelMatch, module: nn.Module, named: bool, anywhere: bool) -> KernelGate | str:
    kernel = catalog.find(found.kernel)
    if anywhere:
        everywhere = tuple(type(one)(name=one.name, limits={}, config=one.config) for one in kernel.buckets[:1])
        return KernelGate(kernel=kernel, buckets=dict.fromkeys((*kernel.dtypes, torch.float64), everywhere), devices=("cuda", "cpu"), cast=found.cast)
    if named:
        return KernelGate(kernel=kernel, buckets=dict.fromkeys(kernel.dtypes, kernel.buckets), cast=found.cast)
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    buckets = {dtype: measured.on_by_default(kernel, measured.device_name(device), dtype) for dtype in kernel.dtypes}
    buckets = {dtype: some for dtype, some in buckets.items() if some}
    return KernelGate(kernel=kernel, buckets=buckets, cast=found.cast) if buckets else f"{kernel.name} is not measured to be faster on {device.type}"


def names_in(applied: Sequence[Applied]) -> tuple[str, ...]:
    """The kernels that are in."""
    return tuple(dict.fromkeys(one.kernel for some in applied for one in some.swapped))
