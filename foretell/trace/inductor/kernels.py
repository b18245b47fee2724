"""Which kernels a graph becomes: Inductor's choice of what is stored and what is fused, as rules.

    nodes ──► steps: each stores something ──► groups: steps that share data and walk through it alike ──► in order

A value with one result per element is not stored: whatever reads it computes it, unless a library kernel or
somebody outside reads it, or too much hangs on it. Then steps that share data are merged, the most shared bytes
first, if they go through the same number of elements. The rules are those of torch 2.11 on CUDA. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.trace.inductor.graph import (
    EXTERN,
    INPUT,
    ITEM,
    POINTWISE,
    REDUCTION,
    SCATTER,
    STRAIGHT,
    VIEW,
    Node,
    without_ones,
    words,
)

FULL, ROWS, COLUMNS, OTHER = "full", "rows", "columns", "other"
"""How a step reads a buffer: element by element in order; one element for each row; all of it, but down the
columns; any other way."""

FEW_CONVOLUTIONS = 300
"""Nodes per convolution from which on images keep their layout."""
READS_IF_REUSED = 4
READS_AT_ALL = 8
OPS = 30
OPS_AT_ALL = 100
"""Reads and ops beyond which a value is stored rather than computed wherever it is needed."""


class Buffer:
    """A piece of memory that a step writes, or that comes from outside."""

    __slots__ = ("alias", "maker", "node", "readers", "size", "stored")

    def __init__(self, node: Node, maker: KernelStep | None) -> None:
        self.node, self.maker = node, maker
        self.size = node.size
        self.readers: list[KernelStep] = []
        self.stored = False
        """Somebody outside the graph wants it."""
        self.alias: Buffer | None = None
        """Written in place of this one."""

    def __repr__(self) -> str:
        return f"<{self.node!r}>"


class KernelStep:
    """What stores one value, or calls one library kernel."""

    __slots__ = ("inner", "kind", "loads", "nodes", "numel", "order", "reads", "rnumel", "shape", "writes")

    def __init__(self, order: int, kind: str, numel: int, rnumel: int, inner: bool) -> None:
        self.order, self.kind, self.numel, self.rnumel, self.inner = order, kind, numel, rnumel, inner
        self.reads: dict[Buffer, str] = {}
        self.writes: list[Buffer] = []
        self.nodes: dict[int, Node] = {}
        self.loads: dict[tuple[Buffer, tuple[int, ...]], str] = {}
        self.shape: tuple[int, ...] = ()
        """Of what it walks through, dimensions of size one left out."""


@dataclass
class _Formula:
    """A value that is not stored: what it reads and what it does."""

    reads: dict[Buffer, str] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    ops: int = 0
    loads: dict[tuple[Buffer, tuple[int, ...]], str] = field(default_factory=dict)
    """Each place read, by the views that lead there, and how: two parts of one buffer are two loads."""


_Value = Buffer | _Formula

_LATER = {(FULL, FULL): FULL, (FULL, ROWS): ROWS, (ROWS, FULL): ROWS, (ROWS, ROWS): ROWS}
"""How a buffer is read by what reads a formula that reads it; any other pair: in another way."""


class Lowering:
    """Goes through the nodes in order and decides what is stored."""

    def __init__(self, nodes: Sequence[Node], stored: set[int], *, channels_last: bool = False) -> None:
        self.channels_last = channels_last
        """Images are laid out with their channels together."""
        self.steps: list[KernelStep] = []
        self.buffers: dict[int, Buffer] = {}
        """By node: what stands in memory."""
        self.outside: dict[int, Buffer] = {}
        """By node: what the graph is given."""
        self.values: dict[int, _Value] = {}
        self._inside = {node.index for node in nodes}
        self._stored = stored
        for node in nodes:
            self._lower(node)
        for node in nodes:
            if node.index in stored:
                buffer = self.buffers.get(self.anchor(node).index)
                if buffer is not None:
                    buffer.stored = True

    # ------------------------------------------------------------------ one node

    def anchor(self, node: Node) -> Node:
        """The value that a view looks at; a view that was stored by itself is one."""
        while node.kind == VIEW and node.index not in self.values:
            node = node.inputs[0]
        return node

    def _lower(self, node: Node) -> None:
        if node.kind == VIEW:
            if not self._store_view(node):
                self._settle(node)
        elif node.kind == EXTERN:
            self._library(node)
        elif node.kind == REDUCTION:
            self._reduce(node)
        elif node.kind == SCATTER:
            self._scatter(node)
        elif node.multi:
            self._several(node)
        elif node.kind != ITEM:  # items come with their node
            self.values[node.index] = self._formula(node)
            self._settle(node)

    def _formula(self, node: Node) -> _Formula:
        formula = _Formula(nodes={node.index: node}, ops=1 + (node.const is not None))
        inputs = node.inputs[:2] if node.op == "max_pool_backward" else node.inputs  # its third tells but a shape
        for given in dict.fromkeys(inputs):
            base = self.anchor(given)
            value = self._value(base)
            if node.op in _WINDOWS and isinstance(value, _Formula) and len(value.loads) > 1:
                self._store(base)
            self._read(formula, given, node)
        return formula

    def _read(self, formula: _Formula, given: Node, reader: Node) -> None:
        """Add what it takes to have `given` inside a formula of the shape of `reader`."""
        base, how, path = self._look(given, reader)
        value = self._value(base)
        if isinstance(value, Buffer):
            if value.maker is not None and value.maker.kind == POINTWISE and not value.maker.reads:
                formula.ops += 1  # a constant or a range is written down where it is needed, not read
                return
            formula.reads[value] = _worse(formula.reads.get(value), how)
            formula.loads[(value, path)] = _worse(formula.loads.get((value, path)), how)
            formula.ops += 1
            return
        for (buffer, before), mode in value.loads.items():
            formula.loads[(buffer, before + path)] = _LATER.get((mode, how), OTHER)
        for buffer, mode in value.reads.items():
            formula.reads[buffer] = _worse(formula.reads.get(buffer), _LATER.get((mode, how), OTHER))
        for index, inner in value.nodes.items():
            if index not in formula.nodes:
                formula.nodes[index] = inner
                formula.ops += 1 + (inner.const is not None)

    def _look(self, given: Node, reader: Node) -> tuple[Node, str, tuple[int, ...]]:
        """The value behind a view, how the reader walks through it, and by which views."""
        how = FULL
        path: tuple[int, ...] = ()
        node = given
        while node.kind == VIEW and node.index not in self.values:
            source = node.inputs[0]
            if node.mode != STRAIGHT:
                rows = node.numel != source.numel and self._by_row(source.spec.shape, node.spec.shape)
                how = _LATER.get((how, ROWS if rows else OTHER), OTHER)
                path = (node.index, *path)
            node = source
        if reader.op in _GATHERING:
            if reader.op in _INDEXED and given is not reader.inputs[0] and how == FULL:
                return node, FULL if given.numel == reader.numel else ROWS, path
            if reader.op == "slice_scatter":  # the whole, and a part that is put into it
                whole = given.numel == reader.numel
                return (node, how, path) if whole else (node, OTHER, (*path, -given.numel))
            return node, OTHER, (*path, reader.index)
        if reader.kind == POINTWISE and given.numel != reader.numel:
            step = ROWS if self._by_row(given.spec.shape, reader.spec.shape) else OTHER
            how = _LATER.get((how, step), OTHER)
        return node, how, path

    def _by_row(self, small: tuple[int, ...], large: tuple[int, ...]) -> bool:
        """One element for each row, or for each channel where a channel is what a reduction goes through."""
        if not self.channels_last and len(large) > 2 and small == (1, large[1], *[1] * (len(large) - 2)):
            return True
        return _by_row(small, large)

    def _value(self, node: Node) -> _Value:
        """Of a node that is no view; an input of the graph is a buffer."""
        known = self.values.get(node.index)
        if known is not None:
            return known
        buffer = Buffer(node, None)
        self.values[node.index] = self.outside[node.index] = buffer
        return buffer

    # ------------------------------------------------------------------ what is stored

    def _settle(self, node: Node) -> None:
        """Store a value that too much hangs on."""
        base = self.anchor(node)
        if base.index not in self._inside:
            return
        if node.index in self._stored:
            self._store(base)
            return
        value = self.values.get(base.index)
        if not isinstance(value, _Formula):
            return
        users = [user for user in node.users if user.index in self._inside]
        reads = len(value.loads)
        for_library = reads > 1 and any(user.kind in (EXTERN, SCATTER) for user in users)
        reused = len(users) > 1 and (for_library or reads > READS_IF_REUSED or value.ops > OPS)
        long = reads > 1 and (reads > READS_AT_ALL or value.ops > OPS)
        if reused or long or value.ops > OPS_AT_ALL:
            self._store(base)

    def _store_view(self, node: Node) -> bool:
        """What is made of one buffer, and several kernels read as a matrix, is stored as that matrix."""
        users = [user for user in node.users if user.index in self._inside]
        if len(users) < 2 or node.index in self._stored or node.mode != STRAIGHT:
            return False
        value = self.values.get(self.anchor(node).index)
        if not isinstance(value, _Formula) or len(value.loads) > 1 or not any(u.op in _FIXED_LAYOUT for u in users):
            return False
        self._write(self._step(POINTWISE, node, value), node)
        return True

    def _store(self, node: Node) -> Buffer:
        value = self._value(node)
        if isinstance(value, Buffer):
            return value
        return self._write(self._step(POINTWISE, node, value), node)

    def _step(self, kind: str, over: Node, formula: _Formula, *, numel: int | None = None, inner: bool = True) -> KernelStep:
        """A step that walks through the elements of `over`, and leaves `numel` of them if it reduces."""
        left = over.numel if numel is None else numel
        step = KernelStep(len(self.steps), kind, left, max(1, over.numel // max(1, left)), inner)
        step.shape = without_ones(over.spec.shape)
        step.reads, step.loads, step.nodes = dict(formula.reads), dict(formula.loads), dict(formula.nodes)
        if not inner:
            step.reads = {buffer: COLUMNS if mode == FULL else OTHER for buffer, mode in step.reads.items()}
            step.loads = {load: COLUMNS if mode == FULL else OTHER for load, mode in step.loads.items()}
        for buffer in step.reads:
            buffer.readers.append(step)
        self.steps.append(step)
        return step

    def _write(self, step: KernelStep, node: Node) -> Buffer:
        buffer = Buffer(node, step)
        step.writes.append(buffer)
        self.values[node.index] = self.buffers[node.index] = buffer
        return buffer

    # ------------------------------------------------------------------ the other kinds

    def _library(self, node: Node) -> None:
        formula = _Formula(nodes={node.index: node})
        bias = node.inputs[2:] if node.op == "convolution" else ()
        for given in node.inputs:
            if given not in bias:
                formula.reads[self._store(self.anchor(given))] = OTHER
        step = self._step(EXTERN, node, formula)
        for result in self._results(node):
            self._write(step, result)
        if bias:
            self._add_bias(node, bias)

    def _add_bias(self, node: Node, bias: Sequence[Node]) -> None:
        """The bias of a convolution is added by whatever reads the result."""
        buffer = self.buffers.pop(node.index)
        total = _Formula(reads={buffer: FULL}, loads={(buffer, ()): FULL}, ops=2)
        for given in bias:
            part = _Formula()
            self._read(part, given, given)
            total.reads.update(dict.fromkeys(part.reads, OTHER))
            total.loads.update(dict.fromkeys(part.loads, OTHER))
            total.nodes.update(part.nodes)
        self.values[node.index] = total
        self._settle(node)

    def _reduce(self, node: Node) -> None:
        given = node.inputs[0]
        formula = _Formula(nodes={node.index: node})
        self._read(formula, given, node)
        inner = node.inner and not (node.strided and not self.channels_last)
        if not self.channels_last and _is_per_channel(node.const, given.spec.shape):
            inner = True
        step = self._step(REDUCTION, given, formula, numel=node.numel, inner=inner)
        for result in self._results(node):
            self._write(step, result)

    def _several(self, node: Node) -> None:
        step = self._step(POINTWISE, node, self._formula(node))
        for result in self._results(node):
            self._write(step, result)

    def _results(self, node: Node) -> list[Node]:
        if not node.multi:
            return [node]
        return [user for user in node.users if user.op == "item" and user.index in self._inside]

    def _scatter(self, node: Node) -> None:
        """Written into the first input, which is copied if somebody else still wants it."""
        target = self.anchor(node.inputs[0])
        value = self._value(target)
        others = [user for user in target.users if user is not node and user.index in self._inside]
        if not isinstance(value, Buffer) or value.maker is None or others or target.index in self._stored:
            formula = _Formula(reads={value: FULL}, loads={(value, ()): FULL}) if isinstance(value, Buffer) else value
            copy = self._step(POINTWISE, target, formula)
            value = Buffer(target, copy)
            copy.writes.append(value)
        formula = _Formula(nodes={node.index: node})
        source = node.inputs[-1]
        for given in node.inputs[1:]:
            self._read(formula, given, source)
        step = self._step(SCATTER, source, formula)
        step.reads[value] = OTHER
        value.readers.append(step)
        self._write(step, node).alias = value


_GATHERING = words(
    """embedding index gather cat slice_scatter max_pool max_pool_backward constant_pad_nd repeat flip roll avg_pool2d
    avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d reflection_pad2d
    replication_pad2d"""
)
"""Ops of one result per element that read their inputs elsewhere than at that element."""
_WINDOWS = frozenset({"max_pool", "max_pool_backward", "avg_pool2d", "avg_pool2d_backward", "upsample_bilinear2d"})
"""Those that read each input element several times, which is then stored first."""
_FIXED_LAYOUT = frozenset({"mm", "convolution_backward"})
"""Kernels whose inputs are stored the way they read them."""
_INDEXED = frozenset({"embedding", "index", "gather"})
"""Those that are told where by their other inputs."""


def _is_per_channel(dims: object, shape: tuple[int, ...]) -> bool:
    """Whether a reduction leaves one value per channel of a batch of images."""
    return len(shape) > 2 and dims == tuple(dim for dim in range(len(shape)) if dim != 1)


def channels_last(nodes: Sequence[Node]) -> bool:
    """Whether Inductor lays images out with their channels together, for a graph of these nodes."""
    convolutions = [node for node in nodes if node.op == "convolution"]
    count = len(nodes) + len({given.index for node in nodes for given in node.inputs if given.kind == INPUT})
    if not convolutions or count >= FEW_CONVOLUTIONS * len(convolutions):
        return False
    for node in convolutions:
        weight = node.inputs[1].spec.shape
        grouped = weight[1] > 1 and weight[1] != node.inputs[0].spec.shape[1]
        narrowing = len(weight) > 2 and weight[0] * 2 <= weight[1] and weight[2] > 1
        if grouped or narrowing:
            return False
    return not all(_is_small(node.inputs[1].spec.shape) for node in convolutions)


def _is_small(weight: tuple[int, ...]) -> bool:
    return weight[0] <= 64 and weight[1] <= 64


def _worse(first: str | None, second: str) -> str:
    return second if first is None or first == second else OTHER


def _by_row(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Whether the small one has one element for each row of the large one: `(8, 4, 1)` beside `(8, 4, 64)`."""
    if len(small) != len(large):
        return False
    kept = len(small)
    while kept and small[kept - 1] == 1:
        kept -= 1
    return kept > 0 and small[:kept] == large[:kept]
