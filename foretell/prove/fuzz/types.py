"""The values of a generated model. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretell.units import relative_error

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OperandSlot:
    """What an operator takes at one place."""

    kind: str
    """f a float value, c a complex one, p a parameter, u a float buffer, i a buffer of indices, b one of booleans, s a shape."""
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    """Ranks that are tried; which of them work is inferred."""
    high: str = ""
    """Of indices: an expression of the shapes `s` and the arguments that they stay below."""


@dataclass(frozen=True)
class Operator:
    """One kind of node: how it is written, and what may be tried of it. Which of that is valid is inferred."""

    name: str
    kind: str
    call: str
    """Python, with {0}, {1} ... for what the slots hold, {name} for arguments and {layer} for the module."""
    slots: tuple[OperandSlot, ...]
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Name → values to choose from, or `axis` (a dim of slot 0), `order` (a permutation of its dims), `size` (a number)."""
    layer: str = ""
    """Python that makes the module it calls, if it calls one."""
    helper: str = ""
    """Name of the definition it needs."""
    weight: float = 1.0
    most: int = 1 << 18
    """Elements that slot 0 may have at most: some kernels are slow."""
    trials: int = 120
    """Assignments that its rule is inferred from; some are slow even on meta tensors."""


@dataclass(frozen=True)
class Held:
    """A tensor that is there before the step."""

    name: str
    kind: str
    """x an input, p a parameter, frozen one that is not trained, unused one that nothing reads, u, i, b buffers."""
    shape: Shape
    high: int = 0


@dataclass(frozen=True)
class CallNode:
    """One call."""

    op: str
    inputs: tuple[str | Shape, ...]
    outs: tuple[str, ...]
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    layer: str = ""
    """Name of its module, where it has one."""


@dataclass(frozen=True)
class ModelGraph:
    """Calls in order, over what is held."""

    held: tuple[Held, ...]
    nodes: tuple[CallNode, ...]
    outputs: tuple[str, ...]

    def with_(self, **changes: Any) -> ModelGraph:
        return replace(self, **changes)


@dataclass(frozen=True)
class Term:
    """One summand of the loss."""

    value: str
    how: str
    """square, abs, smooth, logits (cross entropy over the last dim), target (mean square to a random target)."""


@dataclass(frozen=True)
class Model:
    """A generated model and how its step is run."""

    seed: str
    index: int
    main: ModelGraph
    terms: tuple[Term, ...]
    block: ModelGraph | None = None
    """What the node `blocks` of the main graph repeats."""
    repeats: int = 0
    forgets: bool = False
    """Whether forward lets go of values after their last use."""
    optimizer: str = "adamw"
    recompute: str = "none"
    accumulate: int = 1
    clip: float | None = None
    modes: tuple[str, ...] = ()
    """Residency of each block in the composed run."""

    def with_(self, **changes: Any) -> Model:
        return replace(self, **changes)

    @property
    def ops(self) -> int:
        inner = len(self.block.nodes) * self.repeats if self.block is not None else 0
        return sum(node.op != "blocks" for node in self.main.nodes) + inner

    @property
    def names(self) -> tuple[str, ...]:
        """Operators it has, each once."""
        nodes = (*self.main.nodes, *(self.block.nodes if self.block is not None else ()))
        return tuple(sorted({node.op for node in nodes if node.op != "blocks"}))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Failure:
    """What was expected of a model and did not hold."""

    kind: str
    """trace, cuda, rule, memory, compose, crash or hang."""
    said: str
    """What was expected, and what was found."""
    alike: str = ""
    """What a smaller model must share to have the same failure."""


@dataclass(frozen=True)
class FuzzVerdict:
    """What was found of one model."""

    index: int
    ops: int = 0
    names: tuple[str, ...] = ()
    predicted: int = 0
    measured: int = 0
    scratch: int = 0
    """Bytes that CPU kernels took for themselves above the measured peak."""
    traced: bool = False
    composed: bool = False
    blocks: int = 0
    redrawn: int = 0
    """Draws before it that PyTorch itself refused, or whose loss was not finite."""
    seconds: float = 0.0
    failure: Failure | None = None
    refused: str = ""
    """What foretell refuses with a reason, by PyTorch's own limit, or what cannot be measured: no failure."""

    @property
    def error(self) -> float:
        return relative_error(self.predicted, self.measured) or 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FuzzVerdict:
        known = {key: value for key, value in data.items() if key != "error"}
        known["names"] = tuple(known["names"])
        if known.get("failure") is not None:
            known["failure"] = Failure(**known["failure"])
        return cls(**known)
