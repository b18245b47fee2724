"""Kernels as ops of a trace: what each reads and writes, which storages are born in it and which die after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from foretell.trace import types
from foretell.trace.inductor.fuse import Fusion, Kernel, mixed_rows, splits
from foretell.trace.inductor.graph import INPUT, POINTWISE, REDUCTION, SCATTER, Node, words
from foretell.trace.inductor.joint import Joint
from foretell.trace.inductor.kernels import FULL, OTHER, Buffer, Lowering, channels_last
from foretell.trace.inductor.order import reorder
from foretell.trace.types import Op, Ref, Storage, TensorSpec
from foretell.units import DTYPE_BYTES

FUSED = "foretell.fused"
SPECIAL = words("exp expm1 log log1p log2 sin cos tan tanh erf pow sqrt rsqrt reciprocal sigmoid random")
"""Ops of one element that cost more than an addition: a kernel full of them may be bound by arithmetic."""
_CONVOLUTIONS = ("convolution", "convolution_backward")


class Emitter:
    """Writes the graphs of one program, forward first, into storages."""

    def __init__(self, storages: dict[int, Storage], joint: Joint) -> None:
        self.storages, self.joint = storages, joint
        self.saved: dict[int, int] = {}
        """Storages that go from forward to backward, and their bytes."""
        self.place: dict[int, int] = {}
        """By node: the storage it stands in once forward is over."""
        self.channels_last = False
        self._next = max(storages, default=0) + 1

    def forward(self, nodes: Sequence[Node], saved: Sequence[Node]) -> list[Op]:
        """The ops of forward; what is saved gets storages that live on."""
        self.channels_last = channels_last(nodes)
        outputs = {**self.joint.outputs, **self.joint.mutations}
        return self._emit(nodes, outputs, saved, "forward")

    def backward(self, nodes: Sequence[Node]) -> list[Op]:
        return self._emit(nodes, self.joint.gradients, (), "backward")

    def _emit(self, nodes: Sequence[Node], outputs: Mapping[int, Node], saved: Sequence[Node], phase: str) -> list[Op]:
        if not nodes:
            return []
        wanted = {node.index for node in (*outputs.values(), *saved)}
        lowering = Lowering(nodes, wanted, channels_last=self.channels_last)
        dying = {buffer for buffer in lowering.outside.values() if self.place.get(buffer.node.index) in self.saved}
        kernels = reorder(Fusion(lowering.steps).run(), dying)
        return _GraphWriter(self, lowering, kernels, outputs, saved, phase).ops()

    def new(self, nbytes: int, module: str) -> int:
        number = self._next
        self._next += 1
        self.storages[number] = Storage(nbytes, types.TEMPORARY, module)
        return number


class _GraphWriter:
    """One graph being written down."""

    def __init__(
        self, emitter: Emitter, lowering: Lowering, kernels: list[Kernel], outputs: Mapping[int, Node],
        saved: Sequence[Node], phase: str,
    ) -> None:  # fmt: skip
        self.emitter, self.lowering, self.kernels, self.phase = emitter, lowering, kernels, phase
        self.storage: dict[Buffer, int] = {}
        self.lasting: set[int] = set()
        """Storages that do not die in this graph."""
        self.kept: dict[Buffer, list[Node]] = {}
        """What backward needs, and as which nodes."""
        self.copies: list[tuple[int, Node]] = []
        """Outputs that share memory with another one, and so are copied at the end."""
        self._place_outside()
        self._place_outputs(outputs)
        self._place_saved(saved)
        self.last: dict[Buffer, int] = {}
        """The last kernel that touches a buffer, or what is written in its place."""
        for position, kernel in enumerate(kernels):
            for buffer in kernel.looks:
                self.last[_root(buffer)] = position
        self.until: dict[int, int] = {}
        """By storage: the last kernel that touches it, whoever stands in it."""
        for buffer, number in self.storage.items():
            self.until[number] = max(self.until.get(number, -1), self.last.get(buffer, -1))

    # ------------------------------------------------------------------ who stands where

    def _place_outside(self) -> None:
        for index, buffer in self.lowering.outside.items():
            node = buffer.node
            number = node.storage if node.kind == INPUT else self.emitter.place.get(index)
            assert number is not None, f"{node!r} comes from nowhere"
            self.storage[buffer] = number
            if number not in self.emitter.saved:
                self.lasting.add(number)

    def _buffer(self, node: Node) -> Buffer | None:
        """What a node stands in; None if it is an input of the graph."""
        buffer = self.lowering.buffers.get(self.lowering.anchor(node).index)
        return None if buffer is None else _root(buffer)

    def _place_outputs(self, outputs: Mapping[int, Node]) -> None:
        for number, node in outputs.items():
            self.lasting.add(number)
            buffer = self._buffer(node)
            if buffer is not None and buffer not in self.storage:
                self.storage[buffer] = number
                self.emitter.place[self.lowering.anchor(node).index] = number
            elif node.base().kind != INPUT or self.phase == "backward":
                self.copies.append((number, node))

    def _place_saved(self, saved: Sequence[Node]) -> None:
        for node in saved:
            buffer = self._buffer(node)
            if buffer is None:
                if node.base().storage is not None:
                    self.emitter.place[node.base().index] = node.base().storage  # type: ignore[assignment]
                continue
            self.kept.setdefault(buffer, []).append(self.lowering.anchor(node))
            if buffer in self.storage:  # an output that backward needs too
                self._keep(buffer, self.storage[buffer])

    def _keep(self, buffer: Buffer, number: int) -> None:
        """This storage lives on to backward."""
        old = self.emitter.storages[number]
        role = types.ACTIVATION if old.role == types.TEMPORARY else old.role
        self.emitter.storages[number] = old._replace(role=role, module=buffer.node.module, saved=True)
        self.emitter.saved[number] = buffer.size
        for node in self.kept[buffer]:
            self.emitter.place[node.index] = number
        self.lasting.add(number)

    # ------------------------------------------------------------------ births and deaths

    def ops(self) -> list[Op]:
        done: list[Op] = []
        dying: dict[int, list[Buffer]] = {}
        for buffer, position in self.last.items():
            dying.setdefault(position, []).append(buffer)
        for position, kernel in enumerate(self.kernels):
            written = self._written(kernel)
            born = self._allocate(kernel, written, position)
            numbers = dict.fromkeys(self.storage[b] for b in dying.get(position, ()) if b in self.storage)
            dead = [n for n in numbers if n not in self.lasting and self.until[n] <= position]
            if kernel.fixed:
                done.append(self._library(kernel, born, dead))
            else:
                done.extend(self._fused(kernel, written, born, dead))
        done.extend(self._copy(number, node) for number, node in self.copies)
        return done

    def _written(self, kernel: Kernel) -> list[Buffer]:
        """What a kernel really writes: read by another one, or wanted outside."""
        inside = {step.order for step in kernel.steps}
        return [
            buffer for buffer in kernel.writes
            if buffer.stored or kernel.fixed or buffer.alias is not None
            or any(step.order not in inside for step in buffer.readers)
        ]  # fmt: skip

    def _allocate(self, kernel: Kernel, written: Iterable[Buffer], position: int) -> list[int]:
        """New storages for what is written, unless it goes in place of something."""
        born: list[int] = []
        for buffer in written:
            if buffer.alias is not None:
                continue
            number = self.storage.get(buffer)
            if number is not None:
                if number not in self.emitter.joint.mutations:
                    born.append(number)
                continue
            number = self._in_place(kernel, buffer, position)
            if number is None:
                number = self.emitter.new(buffer.size, buffer.node.module)
                born.append(number)
            self.storage[buffer] = number
            self.until[number] = max(self.until.get(number, -1), self.last[buffer])
            if buffer in self.kept:
                self._keep(buffer, number)
        return born

    def _in_place(self, kernel: Kernel, buffer: Buffer, position: int) -> int | None:
        """The storage of an input of the same size that nobody reads later, if the kernel may write over it.

        Of what forward kept, backward writes over nothing that the model returned: somebody may still look at it."""
        if kernel.fixed:
            return None
        for given, modes in kernel.reads.items():
            number = self.storage.get(given)
            if (
                number is not None
                and modes == {FULL}
                and given not in kernel.writes
                and given.size == buffer.size
                and given.node.spec.dtype == buffer.node.spec.dtype
                and number not in self.lasting
                and number not in self.emitter.joint.outputs
                and self.until[number] == position
            ):
                return number
        return None

    # ------------------------------------------------------------------ ops

    def _library(self, kernel: Kernel, born: list[int], dead: list[int]) -> Op:
        step = kernel.steps[0]
        node = next(iter(step.nodes.values()))
        given = node.inputs[:2] if node.op == "convolution" else node.inputs
        inputs = tuple(Ref(self._storage_of(n), n.spec) for n in given)
        outputs = tuple(Ref(self.storage[b], b.node.spec) for b in step.writes)
        attrs = node.attrs
        if node.op in _CONVOLUTIONS and self.emitter.channels_last:
            plain = [value for value in attrs if not isinstance(value, str)]
            attrs = (*plain[:-1], True)
        return Op(node.name, inputs, outputs, node.module, self.phase, node.flops, tuple(born), tuple(dead), attrs)

    def _storage_of(self, node: Node) -> int:
        buffer = self.lowering.values[self.lowering.anchor(node).index]
        assert isinstance(buffer, Buffer)
        return self.storage[_root(buffer)]

    def _fused(self, kernel: Kernel, written: list[Buffer], born: list[int], dead: list[int]) -> list[Op]:
        space = kernel.numel * kernel.rnumel
        inputs = [self._ref(b, modes, space) for b, modes in kernel.reads.items() if b not in kernel.writes]
        outputs = [self._ref(b, {OTHER} if b.alias is not None else {FULL}, space) for b in written]
        nodes = list({index: node for step in kernel.steps for index, node in step.nodes.items()}.values())
        module = kernel.steps[-1].writes[-1].node.module
        op = Op(
            FUSED, tuple(inputs), tuple(outputs), module, self.phase, sum(node.flops or 0 for node in nodes),
            tuple(born), tuple(dead), _attrs(kernel, nodes),
        )  # fmt: skip
        return self._in_goes(kernel, op)

    def _in_goes(self, kernel: Kernel, op: Op) -> list[Op]:
        """A reduction over much with few results: partial results first, then their sum, perhaps in goes again."""
        width = kernel.rnumel if kernel.mixed else kernel.numel
        parts = _parts(kernel)
        if not parts:
            return [op]
        few = [ref for ref in op.outputs if ref.spec.numel <= width]
        early = [ref for ref in op.outputs if ref.spec.numel > width]
        at_once = {ref.storage for ref in early}
        left = [number for number in op.allocates if number not in at_once]
        sums = sum(1 for step in kernel.steps if step.kind == REDUCTION and not (kernel.mixed and step.inner))
        specs = [TensorSpec((count, width), "float32") for count in parts]
        numbers = [[self.emitter.new(spec.nbytes, op.module) for spec in specs] for _ in range(sums)]
        first = tuple(Ref(line[0], specs[0]) for line in numbers)
        done = [Op(
            FUSED, op.inputs, (*early, *first), op.module, op.phase, op.flops,
            (*(n for n in op.allocates if n in at_once), *(ref.storage for ref in first)), (), op.attrs,
        )]  # fmt: skip
        for position, line in enumerate(numbers):
            final = position == sums - 1
            results = few[position:] if final else few[position : position + 1]
            for step, (number, spec) in enumerate(zip(line, specs, strict=True)):
                ends = step == len(line) - 1
                made = tuple(results) if ends else (Ref(line[step + 1], specs[step + 1]),)
                wanted = {ref.storage for ref in made}
                born = [n for n in left if final or n in wanted] if ends else [line[step + 1]]
                left = [n for n in left if n not in born]
                done.append(Op(
                    FUSED, (Ref(number, spec),), made, op.module, op.phase, spec.numel, tuple(born),
                    (number, *(op.frees if final and ends else ())), _SUM,
                ))  # fmt: skip
        return done

    def _ref(self, buffer: Buffer, modes: set[str], space: int) -> Ref:
        """A buffer as a kernel sees it; of one that is larger than what the kernel walks through, only so much."""
        spec = buffer.node.spec
        if OTHER in modes and spec.numel > space:
            spec = TensorSpec((space,), spec.dtype)
        return Ref(self.storage[_root(buffer)], spec)

    def _copy(self, number: int, node: Node) -> Op:
        anchor = self.lowering.anchor(node)
        value = self.lowering.values.get(anchor.index)
        if isinstance(value, Buffer):
            source = self.storage[_root(value)]
        else:
            source = anchor.storage if anchor.storage is not None else self.emitter.place[anchor.index]
        inputs, outputs = (Ref(source, node.spec),), (Ref(number, node.spec),)
        return Op("aten.clone.default", inputs, outputs, node.module, self.phase, 0, (number,))


def _root(buffer: Buffer) -> Buffer:
    """The buffer whose memory this one is written to."""
    while buffer.alias is not None:
        buffer = buffer.alias
    return buffer


def _parts(kernel: Kernel) -> list[int]:
    """How many partial results there are after each go but the last."""
    if not kernel.reduces:
        return []
    if kernel.mixed:
        return [-(-kernel.numel // mixed_rows(kernel.numel))]
    found: list[int] = []
    count = splits(kernel.numel, kernel.rnumel, inner=not kernel.columns)
    while count > 1:
        found.append(count)
        count = splits(kernel.numel, count, inner=False)
    return found


_SUM = ("columns", "pointwise:0", "reduction:1", "special:0", "float32")
"""What is inside the kernel that adds up partial results."""


def _attrs(kernel: Kernel, nodes: Sequence[Node]) -> tuple[str, ...]:
    """What is inside: the kind of kernel, ops of each kind, the widest dtype, and what it walks through."""
    kind = "scatter" if any(step.kind == SCATTER for step in kernel.steps) else "pointwise"
    if kernel.reduces:
        kind = "mixed" if kernel.mixed else "columns" if kernel.columns else "rows"
    elements = sum(1 for node in nodes if node.kind == POINTWISE)
    reductions = sum(1 for node in nodes if node.kind == REDUCTION)
    special = sum(1 for node in nodes if node.op in SPECIAL)
    dtype = max((node.spec.dtype for node in nodes), key=lambda name: DTYPE_BYTES[name], default="float32")
    return (
        kind, f"pointwise:{elements}", f"reduction:{reductions}", f"special:{special}", dtype,
        f"shape:{kernel.numel}x{kernel.rnumel}",
    )  # fmt: skip
