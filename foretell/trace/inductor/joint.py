"""Which ops of a step torch.compile takes, and the joint graph of forward and backward they make.

    model's forward │ loss, eagerly │ loss's backward, eagerly │ model's backward │ gradients added up, eagerly
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretell.trace import types
from foretell.trace.inductor.graph import BACKWARD, FORWARD, RECOMPUTE, Graph, Node, Values, nbytes, words
from foretell.trace.inductor.masks import Masks
from foretell.trace.inductor.rules import base_name, translate, write_into
from foretell.trace.types import Op, Ref, Storage, TensorSpec

MODEL_END = "foretell.model_end"


@dataclass(frozen=True)
class ProgramOps:
    """The ops of a program, by who runs them."""

    forward: Sequence[Op]
    between: Sequence[Op]
    """Loss and its backward, which stay eager."""
    backward: Sequence[Op]
    after: Sequence[Op]
    """Gradients that are added to those of earlier micro-batches."""
    outputs: Sequence[Ref]
    """What the model returns and the loss reads."""
    unread: Sequence[Ref] = ()
    """What it returns with a gradient and nobody reads, as logits beside a loss."""


def pieces(ops: Sequence[Op], storages: Mapping[int, Storage]) -> ProgramOps:
    """Cut the ops of one micro-batch where the compiled model begins and ends."""
    late = (i for i, op in enumerate(ops) if op.phase in (BACKWARD, RECOMPUTE) and not op.name.startswith("foretell."))
    start = next(late, len(ops))
    marks = [i for i in range(start) if ops[i].name == MODEL_END]
    end = marks[-1] if marks else start
    born = {number for op in ops[:end] for number in op.allocates}
    outputs = _outputs(ops, end, start, born)
    first = _first_of_model(ops, start, born - {ref.storage for ref in outputs}, storages)
    begin = _after_gradients_of(ops, start, first, outputs)
    here = {number for op in ops for number in op.allocates}
    backward: list[Op] = []
    after: list[Op] = []
    for op in ops[begin:]:
        old = any(storages[n].role == types.GRADIENT and n not in here for n in touched(op))
        (after if old else backward).append(op)
    return ProgramOps(ops[:end], ops[end:begin], backward, after, outputs, _unread_outputs(ops[end:start], outputs, born))


def touched(op: Op) -> list[int]:
    return [ref.storage for ref in (*op.inputs, *op.outputs)]


def _outputs(ops: Sequence[Op], end: int, start: int, born: set[int]) -> list[Ref]:
    found: dict[int, Ref] = {}
    for op in ops[end : start + 1]:
        for ref in op.inputs if op.name != MODEL_END else ():
            if ref.storage in born:
                found.setdefault(ref.storage, ref)
    if not found and start >= len(ops):
        found = _unread(ops[:end], born)
    return list(found.values())


def _unread_outputs(ops: Sequence[Op], outputs: Sequence[Ref], born: set[int]) -> list[Ref]:
    known = {ref.storage for ref in outputs}
    returned = ops[0].inputs if ops and ops[0].name == MODEL_END else ()
    return list({ref.storage: ref for ref in returned if ref.storage in born and ref.storage not in known}.values())


def _unread(ops: Sequence[Op], born: set[int]) -> dict[int, Ref]:
    """Of a forward alone: what is alive at its end and nothing has computed with, so somebody wants it."""
    gone = {number for op in ops for number in op.frees}
    read: set[int] = set()
    found: dict[int, Ref] = {}
    for op in ops:
        views = {ref.storage for ref in op.outputs if ref.storage not in op.allocates}
        read.update(ref.storage for ref in op.inputs if ref.storage not in views)
        found.update({ref.storage: ref for ref in op.outputs if ref.storage in born})
    return {number: ref for number, ref in found.items() if number not in read and number not in gone}


def _first_of_model(ops: Sequence[Op], start: int, inside: set[int], storages: Mapping[int, Storage]) -> int:
    """The first op of backward that reads something of the model's own."""
    for position in range(start, len(ops)):
        for ref in ops[position].inputs:
            if ref.storage in inside or storages[ref.storage].role in (types.PARAMETER, types.BUFFER):
                return position
    return len(ops)


def _after_gradients_of(ops: Sequence[Op], start: int, first: int, outputs: Sequence[Ref]) -> int:
    """Where the gradients of all outputs are there: behind the last op that makes a tensor like each of them."""
    begin = start
    for output in outputs:
        for position in range(first - 1, start - 1, -1):
            if any(ref.spec == output.spec for ref in ops[position].outputs):
                begin = max(begin, position + 1)
                break
    return begin if outputs else first


@dataclass
class Joint:
    """Forward and backward of the model as one graph."""

    graph: Graph
    outputs: dict[int, Node] = field(default_factory=dict)
    """Storage of the trace → what the model returns in it."""
    gradients: dict[int, Node] = field(default_factory=dict)
    mutations: dict[int, Node] = field(default_factory=dict)
    """Buffers that the model writes to → their new value."""
    tangents: set[int] = field(default_factory=set)
    """Storages of the gradients that backward is given."""
    inputs: dict[int, Node] = field(default_factory=dict)
    zeros: list[Ref] = field(default_factory=list)
    """Gradients of outputs that nobody reads: backward is given zeros for them."""
    low: str = ""
    """What autocast casts products of float32 in backward to: backward is traced under the autocast of forward."""
    masks: Masks | None = None


def join(parts: ProgramOps, storages: dict[int, Storage], low: str = "", masked: Iterable[str] = ()) -> Joint:
    """Build the graph of a micro-batch, or of a forward alone; what is `masked` (compiled_masks) is attention of these kinds."""
    graph = Graph()
    values = Values(graph)
    joint = Joint(graph, low=low, masks=Masks(frozenset(masked), low) if masked else None)
    for op in parts.forward:
        _take(graph, values, joint, op, FORWARD, storages)
    for ref in (*parts.outputs, *parts.unread):
        joint.outputs[ref.storage] = values.read(_reader(ref))[0]
    born = {number for op in parts.between for number in op.allocates}
    graph.phase = BACKWARD
    wanted = {ref.storage for op in parts.after for ref in op.inputs}
    last: dict[int, Node] = {}
    waiting = _zeros(parts, joint, storages)
    for op in parts.backward:
        for ref in op.inputs:
            if ref.storage in born:
                joint.tangents.add(ref.storage)
        made = _take(graph, values, joint, op, RECOMPUTE if op.phase == RECOMPUTE else BACKWARD, storages)
        for ref, node in zip(op.outputs, made, strict=False):
            zero = waiting.pop(ref.spec, None)
            if zero is not None:
                node = graph.pointwise("add", node, values.read(_reader(zero))[0])
                values.overwrite(ref, node)
            if storages[ref.storage].role == types.GRADIENT or ref.storage in wanted:
                last[ref.storage] = node
    joint.gradients = last
    joint.inputs = dict(values.inputs)
    graph.link([*joint.outputs.values(), *joint.gradients.values(), *joint.mutations.values()])
    return joint


def _zeros(parts: ProgramOps, joint: Joint, storages: dict[int, Storage]) -> dict[TensorSpec, Ref]:
    """Zeros for the gradient of every output that nobody reads. They are added to the first gradient that looks like it."""
    for ref in parts.unread if parts.backward else ():
        number = max(storages) + 1
        storages[number] = Storage(nbytes(ref.spec), types.TEMPORARY, "")
        joint.zeros.append(Ref(number, ref.spec))
    return {ref.spec: ref for ref in joint.zeros}


def _reader(ref: Ref) -> Op:
    return Op("foretell.output", (ref,), (), "", FORWARD, 0)


def _take(
    graph: Graph, values: Values, joint: Joint, op: Op, phase: str, storages: Mapping[int, Storage]
) -> list[Node]:
    """Add one op to the graph, and remember what its outputs now are."""
    if not op.outputs:
        return []
    graph.phase, graph.module = phase, op.module
    given = values.read(op)
    made = _made(graph, joint, op, phase, given)
    new = set(op.allocates)
    result: list[Node] = []
    for ref, node in zip(op.outputs, made, strict=False):
        if ref.storage in new or not writes(op):
            values.hold(ref, node)
        else:
            node = write_into(graph, values.latest(ref.storage) or node, ref, node)
            values.overwrite(Ref(ref.storage, node.spec), node)
            if storages[ref.storage].role in (types.BUFFER, types.PARAMETER):
                joint.mutations[ref.storage] = node
        result.append(node)
    return result


_PRODUCTS = words("mm bmm addmm baddbmm addbmm mv")


def _made(graph: Graph, joint: Joint, op: Op, phase: str, given: list[Node]) -> list[Node]:
    name = base_name(op.name)
    if joint.masks is not None:
        masked = joint.masks.take(graph, name, op, given)
        if masked is not None:
            return masked
    if not (phase == BACKWARD and joint.low and name in _PRODUCTS and op.outputs[0].spec.dtype == "float32"):
        return translate(graph, op, given)
    ref = op.outputs[0]
    cast = replace(op, outputs=(Ref(ref.storage, TensorSpec(ref.spec.shape, joint.low)),))
    made = translate(graph, cast, [graph.cast(node, joint.low) for node in given])
    return [graph.cast(made[0], "float32")]


def writes(op: Op) -> bool:
    """Whether an op writes into a storage that was there, rather than looking at it in another way."""
    name = base_name(op.name)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or op.name.endswith(".out") or name == "add"  # autograd adds gradients where the first one stands
