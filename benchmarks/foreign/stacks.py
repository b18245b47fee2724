"""Software stacks as data: what another framework runs for the same model and mesh. One TOML file each, with its source.

A stack changes the program (spelled-out attention, dropout, fused kernels, when gradients travel) and names at most three
constants that were fitted on published runs. Everything else is priced as for PyTorch. No constant belongs to one run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from foretell.errors import FileFormatError, UnknownName

FOLDER = Path(__file__).parent / "stacks"
MOST_FITTED = 3
EARLY, LATE = "early", "late"
"""When gradients are reduced over data ranks: while backward runs, or after the last backward."""
OPS, ALTERNATE, PRODUCTS_ALONE, LAYERS, ATTENTION = "ops", "alternate", "alternate-products", "layers", "attention"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One framework with its kernels and versions."""

    name: str
    framework: str
    source: str
    """Where it is known from what this software runs."""
    native: bool = False
    """PyTorch's own FSDP2, tensor and pipeline parallelism: the plan can be run."""
    spelled: bool = False
    """Attention is two products with a softmax between them."""
    kernel: str = ""
    """Attention kernel, a name in `attention.KERNELS`; empty: the one that PyTorch picks."""
    dropout: float = 0.0
    tied: bool = True
    compile: str = "none"
    """How far memory-bound kernels are fused, by torch.compile or by hand: none, blocks, model."""
    loss: float = 1.0
    """Factor on the seconds of the loss where it is compiled or written as one kernel."""
    fuses_loss: bool = False
    """The loss is compiled: neither logits in float32 nor their gradient lie in memory."""
    fused_keys: int = 0
    """Longest row of scores that a fused softmax takes; 0: any."""
    optimizer: str = "adamw-fused"
    reduces: str = EARLY
    reduce_bytes: int = 4
    """Per gradient element on the wire and between micro-batches."""
    by_unit: bool = False
    """Sharded gradients alone (ZeRO-2) are those of FSDP: blocks are gathered once a step and scattered one by one."""
    all_reduce: bool = False
    """With sharded optimizer states gradients are still all-reduced."""
    sequence: bool = True
    """Between tensor-parallel regions activations are split along the sequence, where a run does not say."""
    splits_messages: bool = True
    """Tensor-parallel ranks of a stage each send their part of an activation."""
    waits_for_messages: bool = False
    """A stage of a pipeline does nothing else while it sends and receives."""
    keeps_sent: bool = False
    """A stage keeps what it sends on until its backward."""
    hidden: float = 0.0
    """Share of tensor-parallel traffic that runs beside products."""
    hides_backward: bool = False
    """In backward tensor-parallel reductions run beside the products for the weights' gradients."""
    selective: str = OPS
    """What selective recomputation means: ops (results of products and attention are kept), alternate (of every second
    product, and of attention), alternate-products (of every second product alone), layers (every second one is
    recomputed), attention (its scores alone are recomputed)."""
    whole_blocks: bool = False
    """Recomputing a block runs all of it, also what backward does not need."""
    balanced: bool = True
    """Context-parallel ranks have equal shares of causal attention."""
    narrow_tensor: bool = False
    """With 8-bit products, tensor-parallel ranks cast before they gather."""
    blocking: bool = False
    """The host waits for every kernel (CUDA_LAUNCH_BLOCKING)."""
    state_bytes: tuple[float, float] = (4.0, 12.0)
    """Per parameter: 16-bit weights and gradients on every rank; what ZeRO-1 spreads."""
    buffer_bytes: float = 0.0
    """Buckets for gathering and reducing."""
    reports: str = "reserved"
    """Which memory its users print: allocated, reserved, or device (of the first rank)."""
    fitted: Mapping[str, float] = field(default_factory=dict)
    """memory_bound: factor on the seconds of memory-bound kernels; blocking_seconds: what a blocking launch adds to a kernel;
    ring_loss: longer attention for each further context-parallel rank."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Field → why it has this value."""

    def fit(self, name: str, otherwise: float) -> float:
        return float(self.fitted.get(name, otherwise))

    @property
    def mark(self) -> str:
        """What an answer says of a plan for this stack."""
        return "" if self.native else f"not runnable here: the plan is for {self.framework} ({self.source})"


@cache
def stacks() -> Mapping[str, Stack]:
    """All known stacks by name."""
    read = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}
    return {name: _stack(name, read) for name in read}


def stack(name: str) -> Stack:
    if name not in stacks():
        raise UnknownName("stack", name, tuple(stacks()), f"known: {', '.join(stacks())}")
    return stacks()[name]


def _stack(name: str, read: Mapping[str, Mapping[str, Any]]) -> Stack:
    """A stack, with what it takes over from the one it names as its base."""
    given = dict(read[name])
    base = given.pop("base", None)
    known = {one.name for one in fields(Stack)} - {"name"}
    unknown = sorted(set(given) - known)
    if unknown or (base is not None and base not in read):
        raise FileFormatError(f"stack {name}: unknown {', '.join(unknown) or base}", f"known: {', '.join(sorted(known))}")
    if "state_bytes" in given:
        given["state_bytes"] = tuple(given["state_bytes"])
    if base is None:
        found = Stack(name=name, **given)
    else:
        below = _stack(base, read)
        given["reasons"] = {**below.reasons, **given.get("reasons", {})}
        found = replace(below, **{"name": name, "fitted": below.fitted, **given})
    if len(found.fitted) > MOST_FITTED:
        raise FileFormatError(f"stack {name} has {len(found.fitted)} fitted constants", f"at most {MOST_FITTED}")
    return found
