"""What torch.compile makes of a traced step: the same step with fewer kernels, and other tensors in memory.

    eager trace ─► joint graph ─► what is kept for backward ─► kernels ─► a trace of the same shape

The model is taken as one graph without breaks; the loss and the optimizer stay eager, as `model.compile()` leaves
them. Library kernels keep their names; everything else runs in ops named `foretell.fused`, whose inputs and outputs
are what is really read and written. The rules are those of torch 2.11 on CUDA. Plain data, no torch.

    compiled_joint    which ops are compiled; forward and backward as one graph of values (compiled_graph),
                      ops taken apart as Inductor does it (compiled_rules, compiled_parts)
    compiled_cut      what the partitioner keeps from forward for backward, and what it computes again
    compiled_kernels  what is stored and what is computed where it is needed
    compiled_fuse     which steps are one kernel; compiled_order: in which order they run
    compiled_emit     kernels as ops, with the births and deaths of their storages
    compiled_blocks   block by block instead of the whole
    compiled_graphs   with CUDA graphs: what is replayed, and in which memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretell.trace import types
from foretell.trace.inductor.blocks import BlockOf, in_blocks
from foretell.trace.inductor.cuda_graphs import replayed
from foretell.trace.inductor.emit import Emitter
from foretell.trace.inductor.graph import FORWARD
from foretell.trace.inductor.joint import Joint, ProgramOps, join, pieces, touched
from foretell.trace.inductor.partition import Partition, partition
from foretell.trace.inductor.rules import SAME, VIEWS, base_name
from foretell.trace.recipe import COMPUTES
from foretell.trace.types import Op, Program, Storage, Trace

RULES = "2.11"
"""Version of torch whose rules are followed."""
ONE_GRAPH = "torch.compile takes the model as one graph, without breaks"
MANY_GRAPHS = "torch.compile takes the model in pieces, since it reads values {} times; each costs the host, what fuses is costed as in one"
READ = "aten._local_scalar_dense.default"
OFTEN = 2
"""Reads of values in a forward that are taken for breaks; libraries ask once whether a mask is needed at all, and do not if compiled."""
COMPILED = ("micro_first", "micro_next", "again", "again_next", "forward")
"""Programs that call the model."""
_SILENT = {*SAME, *VIEWS, "split", "split_with_sizes", "unbind", "chunk", "_conj", "empty", "empty_like", "new_empty"}
"""Ops that launch nothing."""


def compile_trace(trace: Trace, *, cuda_graphs: bool = False, block_of: BlockOf | None = None) -> Trace:
    """The trace of the same step under torch.compile.

    With `cuda_graphs` (mode "reduce-overhead") what the model computes is replayed: between marks, and in memory of
    its own, which nothing else uses; what is not always at one address is copied in (compiled_graphs). With `block_of`
    every block is compiled for itself (compiled_blocks).
    """
    storages = dict(trace.storages)
    programs = dict(trace.programs)
    about: dict[str, object] = {"rules": RULES, "cuda_graphs": cuda_graphs}
    known = trace.meta.get("assumed")
    assumed = list(known) if isinstance(known, (list, tuple)) else []
    if block_of is not None:
        blocks = trace.meta.get("blocks", ())
        assert isinstance(blocks, Sequence)
        for name in [name for name in programs if name in COMPILED]:
            programs[name] = Program(name, tuple(in_blocks(programs[name].ops, blocks, block_of, storages)))
        about["blocks"] = True
    else:
        saved: dict[str, int] = {}
        for name, program in trace.programs.items():
            if name in COMPILED:
                programs[name], saved[name] = _compile(program, storages, cuda_graphs, *_ways(trace))
        about["saved_bytes"] = saved
        about["breaks"] = count = breaks(trace)
        assumed.append(MANY_GRAPHS.format(count) if count else ONE_GRAPH)
    used = {n for p in programs.values() for op in p.ops for n in (*op.allocates, *op.frees, *touched(op))}
    used.update(trace.resident)
    return replace(
        trace,
        programs=programs,
        storages={number: storage for number, storage in storages.items() if number in used},
        meta={**trace.meta, "compiled": about, "assumed": assumed},
    )


def breaks(trace: Trace) -> int:
    """How often the model reads a value of a tensor in its forward, which no one graph can; none where it is once at most."""
    program = next((trace.programs[name] for name in ("forward", "micro_first") if name in trace.programs), None)
    found = sum(op.name == READ and op.phase == FORWARD for op in program.ops) if program is not None else 0
    return found if found >= OFTEN else 0


def launches(trace: Trace) -> dict[str, int]:
    """Ops of each program that launch something, eager or compiled; one on a list of tensors counts once."""
    return {name: sum(map(_launches, program.ops)) for name, program in trace.programs.items()}


def _launches(op: Op) -> bool:
    return bool(op.inputs or op.outputs) and base_name(op.name) not in _SILENT


def _ways(trace: Trace) -> tuple[str, Sequence[str]]:
    """What autocast casts products to, if it is on; kinds of attention masks that the model builds only if compiled."""
    recipe, masked = trace.meta.get("recipe"), trace.meta.get("masked_if_compiled", ())
    precision = str(recipe.get("precision", "")) if isinstance(recipe, Mapping) else ""
    assert isinstance(masked, Sequence)
    return COMPUTES[precision] if precision.endswith("-autocast") else "", masked


def _compile(
    program: Program, storages: dict[int, Storage], cuda_graphs: bool, low: str, masked: Sequence[str]
) -> tuple[Program, int]:
    """A program with the model's part compiled, and the bytes that it keeps from forward to backward."""
    first = next((place for place, op in enumerate(program.ops) if op.phase == FORWARD), 0)
    lead, rest = (program.ops[:first], program.ops[first:]) if first > 1 else ((), program.ops)  # what the last step left to do
    parts = pieces(rest, storages)
    joint = join(parts, storages, low, masked)
    split = _split(joint, storages)
    emitter = Emitter(storages, joint)
    forward = emitter.forward(split.forward, split.saved)
    backward = emitter.backward(split.backward)
    between = _eager(parts.between, emitter)
    between += [Op("aten.zeros.default", (), (ref,), "", "backward", 0, (ref.storage,)) for ref in joint.zeros]
    backward = _without_zeros(_closed(backward, parts, joint), joint)
    if cuda_graphs:
        forward, backward = replayed(forward, storages), replayed(backward, storages)
    head = [op for op in parts.forward[:1] if op.name == "foretell.begin"]
    ops = (*head, *forward, *between, *backward, *parts.after)
    return Program(program.name, (*lead, *ops)), sum(emitter.saved.values())


def _split(joint: Joint, storages: Mapping[int, Storage]) -> Partition:
    nodes = joint.graph.nodes
    here = {id(node) for node in nodes}
    free = {
        node.index
        for number, node in joint.inputs.items()
        if storages[number].role in (types.PARAMETER, types.BUFFER) and id(node) in here
    }
    return partition(nodes, [*joint.outputs.values(), *joint.mutations.values()], list(joint.gradients.values()), free)


def _eager(ops: Sequence[Op], emitter: Emitter) -> list[Op]:
    """Ops that stay as they are. What lived inside the model is gone; what the model returned dies with the loss,
    unless backward keeps it."""
    joint = emitter.joint
    born = {number for op in ops for number in op.allocates}
    returned = [number for number in joint.outputs if number not in emitter.saved]
    freed: set[int] = set()
    done: list[Op] = []
    for op in ops:
        frees = tuple(n for n in op.frees if (n in born or n in returned) and n not in joint.tangents)
        freed.update(frees)
        done.append(replace(op, frees=frees))
    late = tuple(number for number in returned if number not in freed)
    if late and done:
        last = max((i for i, op in enumerate(done) if op.phase == "forward"), default=len(done) - 1)
        done[last] = replace(done[last], frees=(*done[last].frees, *late))
    return done


def _without_zeros(backward: Sequence[Op], joint: Joint) -> list[Op]:
    """Zeros that were made for backward die with their last reader: nobody else holds them."""
    done = list(backward)
    for zero in joint.zeros if done else ():
        last = max((i for i, op in enumerate(done) if zero.storage in touched(op)), default=0)
        done[last] = replace(done[last], frees=(*done[last].frees, zero.storage))
    return done


def _closed(backward: Sequence[Op], parts: ProgramOps, joint: Joint) -> list[Op]:
    """Backward with the deaths at its end: the gradients it was given, which the caller holds, and loose ends."""
    if not backward:
        return []
    born = {number for op in parts.between for number in op.allocates}
    later = {number for op in parts.after for number in op.frees}
    loose = [n for op in parts.backward for n in op.frees if n in born]
    dying = [n for n in dict.fromkeys([*sorted(joint.tangents), *loose]) if n not in later]
    return [*backward[:-1], replace(backward[-1], frees=(*backward[-1].frees, *dying))]
