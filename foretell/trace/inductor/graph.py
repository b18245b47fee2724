"""The ops of a step as one graph of values, the way torch.compile sees it: functional, decomposed, no duplicates.

    ops of a program ──► values by storage and shape ──► decomposed nodes ──► dead ones dropped

An op of a trace speaks of storages; a node here speaks of the nodes it reads. An op in place makes a new value
of its storage. Composite ops are taken apart as Inductor takes them apart (`compiled_rules`), because what is
saved for backward and what fuses is decided on the parts. Plain data, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foretell.trace.types import Op, Ref, TensorSpec
from foretell.units import DTYPE_BYTES

INPUT, VIEW, POINTWISE, REDUCTION, EXTERN, ITEM, SCATTER = (
    "input", "view", "pointwise", "reduction", "extern", "item", "scatter",
)  # fmt: skip
"""What a node is: an input of the graph, another look at a value, one value per element, a reduction, a library
kernel, one result of a node with several, a write to scattered places."""

STRAIGHT, BROADCAST, PERMUTED, SLICED = "straight", "broadcast", "permuted", "sliced"
"""How a view walks through its base: in the same order, with repeats, in another order, a part of it."""

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUSIBLE = words(
    """abs acos acosh add addcdiv addcmul alias amax angle any arange argmax as_strided asin asinh atan atan2 atanh
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor cast ceil celu clamp
    clamp_max clamp_min clone copysign cos cosh digamma div elu empty empty_like eq erf erfc erfinv exp exp2 expand
    expm1 floor fmax fmin fmod frac full full_like gather ge gelu gelu_backward gt hardshrink hardsigmoid hardtanh
    heaviside hypot index iota isfinite isinf isnan item ldexp le lerp lgamma log log10 log1p log2 logaddexp
    logical_and logical_not logical_or logical_xor logit lt masked_fill max maximum mean min minimum mish mul
    nan_to_num ne neg new_zeros ones permute polygamma pow reciprocal relu relu6 remainder reshape round rsqrt rsub
    scalar_tensor select selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh slice
    softplus softshrink split sqrt square squeeze std sub sum t tan tanh tanh_backward threshold threshold_backward
    triu trunc unsqueeze var var_mean view where xlogy zeros zeros_like"""
)
"""Ops that the partitioner may compute again in backward and expects to fuse (torch 2.11 and 2.13)."""

KEPT_VIEWS = words("squeeze unsqueeze alias view slice t expand as_strided permute select split")
"""Views that the partitioner knows to be views."""


class Node:
    """One value, or one op with several."""

    __slots__ = (
        "attrs", "const", "flops", "fusible", "index", "inner", "inputs", "kind", "mode", "module", "multi", "name", "op",
        "phase", "size", "spec", "storage", "strided", "users",
    )  # fmt: skip

    def __init__(
        self, index: int, op: str, kind: str, inputs: tuple[Node, ...], spec: TensorSpec, phase: str, module: str
    ) -> None:
        self.index, self.op, self.kind, self.inputs, self.spec = index, op, kind, inputs, spec
        self.phase, self.module = phase, module
        self.fusible = op in FUSIBLE
        self.size = nbytes(spec)
        self.users: list[Node] = []
        self.mode = STRAIGHT
        """Of a view: how it walks through its base."""
        self.inner = True
        """Of a reduction: over the last dimensions."""
        self.const: object = None
        self.storage: int | None = None
        """Storage of the trace that holds this value, for inputs."""
        self.name = ""
        """Of a library kernel: the op of the trace."""
        self.attrs: tuple[int | float | str | bool, ...] = ()
        self.flops: int | None = 0
        self.strided = False
        """Of a reduction: the trace found its rows spread out in memory, as behind a convolution."""
        self.multi = False
        """It has several results, each with a node of its own; it is no tensor itself."""

    @property
    def is_view(self) -> bool:
        """Whether the partitioner takes it for a view."""
        return self.op in KEPT_VIEWS

    @property
    def numel(self) -> int:
        return self.spec.numel

    def base(self) -> Node:
        """The value that this one is a view of."""
        node = self
        while node.kind == VIEW:
            node = node.inputs[0]
        return node

    def __repr__(self) -> str:
        return f"{self.op}#{self.index}{list(self.spec.shape)}"


def nbytes(spec: TensorSpec) -> int:
    return spec.numel * DTYPE_BYTES[spec.dtype]


class Graph:
    """Nodes in the order in which they were made; equal ones are made once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.phase, self.module = FORWARD, ""
        self._known: dict[object, Node] = {}

    def add(
        self, op: str, kind: str, inputs: Iterable[Node], spec: TensorSpec, *, const: object = None, once: bool = True,
        mode: str = STRAIGHT, inner: bool = True,
    ) -> Node:  # fmt: skip
        """A node; the one made before if it is the same computation and `once` says that they may be shared."""
        given = tuple(inputs)
        # What is computed again on purpose is not the same as what was computed in forward.
        key = (op, tuple([node.index for node in given]), spec, const, self.phase == RECOMPUTE) if once else None
        if key is not None:
            known = self._known.get(key)
            if known is not None:
                return known
        node = Node(len(self.nodes), op, kind, given, spec, self.phase, self.module)
        node.mode, node.inner, node.const = mode, inner, const
        self.nodes.append(node)
        if key is not None:
            self._known[key] = node
        return node

    def link(self, outputs: Sequence[Node]) -> None:
        """Drop what no output needs, number the rest in order, and tell every node its users."""
        live: set[int] = set()
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node.index not in live:
                live.add(node.index)
                stack.extend(node.inputs)
        self.nodes = [node for node in self.nodes if node.index in live]
        self._join_casts()
        for index, node in enumerate(self.nodes):
            node.index = index
            node.users = []
        for node in self.nodes:
            for given in dict.fromkeys(node.inputs):
                given.users.append(node)

    def _join_casts(self) -> None:
        """A cast of a cast that nobody else reads is one cast, of a float to a float."""
        readers: dict[int, int] = {}
        for node in self.nodes:
            for given in dict.fromkeys(node.inputs):
                readers[given.index] = readers.get(given.index, 0) + 1
        for node in self.nodes:
            if node.op == "cast" and "float" in node.spec.dtype:
                inner = node.inputs[0]
                floats = "float" in inner.spec.dtype and inner.inputs and "float" in inner.inputs[0].spec.dtype
                if inner.op == "cast" and readers[inner.index] == 1 and floats:
                    node.inputs = inner.inputs
                    inner.op = "dead"
        self.nodes = [node for node in self.nodes if node.op != "dead"]

    # ------------------------------------------------------------------ what the rules are written with

    def pointwise(
        self, op: str, *inputs: Node, dtype: str | None = None, shape: tuple[int, ...] | None = None,
        const: object = None, once: bool = True,
    ) -> Node:  # fmt: skip
        if shape is None:
            shape = broadcast([node.spec.shape for node in inputs])
        if dtype is None:
            dtype = promote([node.spec for node in inputs])
        return self.add(op, POINTWISE, inputs, TensorSpec(shape, dtype), const=const, once=once)

    def cast(self, node: Node, dtype: str) -> Node:
        if node.spec.dtype == dtype:
            return node
        return self.add("cast", POINTWISE, (node,), TensorSpec(node.spec.shape, dtype))

    def wide(self, node: Node) -> Node:
        """As the arithmetic inside a kernel sees it: low precision is raised to float32."""
        return self.cast(node, "float32") if node.spec.dtype in ("bfloat16", "float16") else node

    def reduce(
        self, op: str, node: Node, dims: Sequence[int], *, keepdim: bool = False, dtype: str | None = None
    ) -> Node:
        shape = node.spec.shape
        rank = len(shape)
        over = {dim % rank for dim in dims} if rank else set()
        if keepdim:
            left = tuple(1 if dim in over else size for dim, size in enumerate(shape))
        else:
            left = tuple(size for dim, size in enumerate(shape) if dim not in over)
        spec = TensorSpec(left, dtype or node.spec.dtype)
        kept = [dim for dim, size in enumerate(shape) if dim not in over and size > 1]
        gone = [dim for dim, size in enumerate(shape) if dim in over and size > 1]
        inner = not kept or not gone or min(gone) > max(kept)
        return self.add(op, REDUCTION, (node,), spec, const=tuple(sorted(over)), inner=inner)

    def view(self, op: str, node: Node, shape: tuple[int, ...], mode: str = STRAIGHT, const: object = None) -> Node:
        if mode == STRAIGHT and shape == node.spec.shape:
            return node
        return self.add(op, VIEW, (node,), TensorSpec(shape, node.spec.dtype), mode=mode, const=const)

    def create(self, op: str, spec: TensorSpec, const: object = None) -> Node:
        return self.add(op, POINTWISE, (), spec, const=const)

    def items(self, parent: Node, specs: Sequence[TensorSpec]) -> list[Node]:
        """The results of a node that has several."""
        parent.multi, parent.size = True, sum(nbytes(spec) for spec in specs)
        kind = VIEW if parent.kind == VIEW else ITEM
        return [
            self.add("item", kind, (parent,), spec, const=number, mode=parent.mode) for number, spec in enumerate(specs)
        ]


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max((len(shape) for shape in shapes), default=0)
    sizes = [1] * rank
    for shape in shapes:
        for position, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                sizes[position] = size
    return tuple(sizes)


_RANKS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def promote(specs: Sequence[TensorSpec]) -> str:
    """The dtype of a sum of these; one number alone does not raise a tensor of the same kind."""
    full = [spec.dtype for spec in specs if spec.shape] or [spec.dtype for spec in specs]
    return max(full, key=lambda dtype: _RANKS.index(dtype) if dtype in _RANKS else len(_RANKS))


class Values:
    """Which node stands for a tensor of the trace, as ops come and go."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs: dict[int, Node] = {}
        """Storages that were there before, and the nodes that stand for them."""
        self._held: dict[int, dict[TensorSpec, list[Node]]] = {}
        self._latest: dict[int, Node] = {}
        self._uses: dict[tuple[int, str], int] = {}

    def read(self, op: Op) -> list[Node]:
        """The nodes an op reads.

        Two views of one storage may look alike (the parts of a split): those that were used least come first.
        """
        found: list[Node] = []
        for ref in op.inputs:
            node = self._pick(ref, found)
            self._uses[(node.index, self.graph.phase)] = self._uses.get((node.index, self.graph.phase), 0) + 1
            found.append(node)
        return found

    def _pick(self, ref: Ref, taken: list[Node]) -> Node:
        held = self._held.get(ref.storage)
        if held is None:
            return self._from_outside(ref)
        candidates = held.get(ref.spec)
        if not candidates:
            base = self._latest[ref.storage]
            op, mode = ("view", STRAIGHT) if base.numel == ref.spec.numel else ("as_strided", SLICED)
            node = self.graph.add(op, VIEW, (base,), ref.spec, mode=mode)
            held[ref.spec] = [node]
            return node
        if len(candidates) == 1:
            return candidates[0]
        phase = self.graph.phase
        order = candidates if phase == FORWARD else candidates[::-1]
        fresh = [node for node in order if node not in taken] or order
        return min(fresh, key=lambda node: self._uses.get((node.index, phase), 0))

    def _from_outside(self, ref: Ref) -> Node:
        node = self.graph.add("input", INPUT, (), ref.spec, const=ref.storage)
        node.storage = ref.storage
        self.inputs[ref.storage] = node
        self.hold(ref, node)
        return node

    def hold(self, ref: Ref, node: Node) -> None:
        """From now on this tensor is this node."""
        held = self._held.setdefault(ref.storage, {})
        nodes = held.setdefault(ref.spec, [])
        if node not in nodes:
            nodes.append(node)
        self._latest.setdefault(ref.storage, node)

    def overwrite(self, ref: Ref, node: Node) -> None:
        """An op in place: the storage holds a new value, and views of the old one look at it."""
        self._held[ref.storage] = {ref.spec: [node]}
        self._latest[ref.storage] = node

    def latest(self, storage: int) -> Node | None:
        """The node that a storage holds as a whole, by now."""
        return self._latest.get(storage)
