"""Put kernels into a model, and take them out again.

    applied = apply(model)                      those measured to be faster on its device
    applied = apply(model, ["rms_norm"])        these, wherever they were verified
    print(applied); applied.revert()

The forward of a module is swapped, on the module and not on its class: modules, parameters, hooks and state dict stay what they are, so
that FSDP2 and torch.compile see the same model. Copies have the kernels too; a pickled model has its own forwards again.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import MethodType

import torch
from torch import nn
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from foretell.errors import UserError
from foretell.kernels import catalog, measured
from foretell.kernels.kernel import ShapeBucket, TrainingKernel
from foretell.kernels.swap.gate import KernelGate
from foretell.kernels.swap.graphs import find_gate, find_residual
from foretell.kernels.swap.match import Finder, KernelMatch
from foretell.kernels.swap.norms import find_norm
from foretell.kernels.swap.rotary import find_rotary

FINDERS: tuple[Finder, ...] = (find_norm, find_gate, find_residual, find_rotary)


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


def apply(
    model: nn.Module, names: Iterable[str] | None = None, *, once: bool = False, anywhere: bool = False, emulated: bool = False
) -> Applied:
    """Swap the forwards of the modules the named kernels can stand for; without names, of kernels that are on by default.

    `once` promises that every graph is gone through once (no `retain_graph`), so that a gate's gradients may take the places of what it
    was given. `anywhere` takes every shape, and a CPU, where the op runs its reference: for trials. `emulated` takes a CPU's tensors,
    real or fake, for those of a GPU: for traces.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"kernels go into a torch module, and this is a {type(model).__name__}", "give the model itself")
    asked = None if names is None else {name: catalog.find(name) for name in names}
    swapped: list[KernelSwap] = []
    left: list[KernelLeft] = []
    put: list[tuple[nn.Module, MethodType]] = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        with outside_modes():
            said = _swapped(module, asked, anywhere)
        if isinstance(said, str):
            left.append(KernelLeft(module=path or "the model", why=said))
        elif said is not None:
            gate, found = said
            with outside_modes():
                forward = MethodType(found.forward(replace(gate, once=once, emulated=emulated)), module)
            module.forward = forward
            put.append((module, forward))
            swapped.append(KernelSwap(module=path or "the model", kernel=found.kernel, how=found.how))
    return Applied(swapped=tuple(swapped), left=tuple(left), modules=tuple(put))


def _swapped(module: nn.Module, asked: dict[str, TrainingKernel] | None, anywhere: bool) -> tuple[KernelGate, KernelMatch] | str | None:
    """A match with its gate, why the module is left, or nothing."""
    for finder in FINDERS:
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
        return gate if isinstance(gate, str) else (gate, found)
    return None


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Real tensors, whatever mode is around, such as that of a trace."""
    with _disable_current_modes(), contextlib.ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield


def _gate(found: KernelMatch, module: nn.Module, named: bool, anywhere: bool) -> KernelGate | str:
    kernel = catalog.find(found.kernel)
    if anywhere:
        any_shape = (ShapeBucket(name="any", limits={}, config={}),)
        return KernelGate(kernel=kernel, buckets=dict.fromkeys((*kernel.dtypes, torch.float64), any_shape), devices=("cuda", "cpu"), **found.gate)
    if why := _unable():
        return why
    if named:
        return KernelGate(kernel=kernel, buckets=dict.fromkeys(kernel.dtypes, kernel.buckets), **found.gate)
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    buckets = {dtype: measured.on_by_default(kernel, measured.device_name(device), dtype) for dtype in kernel.dtypes}
    buckets = {dtype: some for dtype, some in buckets.items() if some}
    if buckets:
        return KernelGate(kernel=kernel, buckets=buckets, **found.gate)
    return f"{kernel.name} was not measured to be faster on this {device.type}"


def _unable() -> str:
    """Why no kernel can run on the GPU of this process; nothing where there is none, as the model may be moved."""
    if not torch.cuda.is_available():
        return ""
    if importlib.util.find_spec("triton") is None:
        return "kernels need Triton, which is not installed"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"kernels are for compute capability 8.0 and above, and {torch.cuda.get_device_name()} has less"
    return ""
