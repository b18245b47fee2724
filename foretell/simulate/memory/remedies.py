"""Which changes may make a step fit: a quick guess from the trace at hand, never an answer.

What is told to a user is predicted (`search.advice.fit`); this only says what is worth predicting, and in which order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any

from foretell.hardware.overheads import Overhead
from foretell.hardware.types import Cluster
from foretell.quantities import Memory
from foretell.simulate.memory.memory import run_order, sizes_for
from foretell.simulate.memory.replay import Replay, Sizes
from foretell.trace import types

NF4_SHARE = 4.5 / 32
"""Of an fp32 weight that is held in four bits and a scale for 64 of them."""
ADAPTERS = 0.03
"""Gradients and states of LoRA adapters, as a share of those of the whole model."""
KEPT = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.convolution.", "aten._scaled_dot_product_")
"""Ops whose results selective recompute keeps."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Bytes of one device by what would lower them."""

    parameters: int
    gradients: int
    """All of them; at the peak fewer may be alive."""
    alive: int
    """Gradients alive at the highest point outside the update."""
    optimizer: int
    moving: int
    """Activations, logits and temporaries there, less `cast`."""
    cast: int
    """Low-precision copies of weights that autocast keeps for backward."""
    cast_in_blocks: int
    full: int
    """Kept for backward inside blocks and freed by full recompute, `cast_in_blocks` included."""
    selective: int
    logits: int
    """Of `moving`: what a loss in chunks has one chunk's of."""
    rows: int
    """Of logits: tokens of a micro-batch that have a loss."""
    linear: int
    """Weights inside blocks that NF4 would hold in four bits."""
    update: int
    """The highest point of the update."""
    foreach: int
    """Of that, temporaries that a fused optimizer does not have."""
    loose: int
    """Reserved bytes that growing segments would not reserve."""
    allocated: int
    reserved: int
    beside: int
    """Context and libraries."""
    beside_many: int
    """The same on more than one device."""
    single: bool
    """Whether nothing is sharded yet."""
    unit: int
    """The largest block's weights, which sharded runs gather."""
    batch_norm: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outlook:
        return cls(**{item.name: data[item.name] for item in fields(cls)})

    def without_states(self, micro_batch: int) -> int:
        """Device bytes with weights and states in host memory, every block computed again, one sample at a time. About right, no more."""
        moving = max(0, self.moving - max(0, self.full - self.cast_in_blocks)) // micro_batch
        return moving + 2 * self.unit + self.beside

    def held(self, change: Mapping[str, Any]) -> int:
        """Device bytes of weights and optimizer states alone with other options of `fit`: what no way of running the step lowers."""
        p, o = float(self.parameters), float(self.optimizer)
        if change.get("lora"):
            o *= ADAPTERS
        if change.get("nf4"):
            p -= self.linear * (1 - NF4_SHARE)
        share = 0.5 if change.get("precision") == "bf16" else 1.0
        return int(share * (p + o) / int(change.get("times", 1))) + self.beside

    def after(self, change: Mapping[str, Any], *, micro_batch: int = 1, precision: str = "") -> int:
        """Device bytes with other options of `fit`; `times`: as many times the devices. About right, no more."""
        p, g, o, alive = (float(value) for value in (self.parameters, self.gradients, self.optimizer, self.alive))
        moving, cast, cast_in = float(self.moving), float(self.cast), float(self.cast_in_blocks)
        freed = {"full": self.full, "selective": self.selective}.get(change.get("recompute", ""), 0) - cast_in
        if change.get("lora"):
            g, o, alive = g * ADAPTERS, o * ADAPTERS, alive * ADAPTERS
        if change.get("nf4"):
            p, cast, cast_in = p - self.linear * (1 - NF4_SHARE), cast - cast_in, 0.0
        if change.get("precision") == "bf16":
            p, g, o, alive, cast, cast_in = p / 2, g / 2, o / 2, alive / 2, 0.0, 0.0
            share = 0.5 if precision == "fp32" else 1.0
            moving, freed = moving * share, freed * share
        times = int(change.get("times", 1))
        if times > 1:
            gathered = self.parameters - self.linear + 2 * self.unit if self.single else 0
            p, g, o, alive, cast, cast_in = p / times, g / times, o / times, alive / times, 0.0, 0.0
            moving += gathered
        if "recompute" in change:
            moving, cast = max(0.0, moving - max(0.0, freed)), cast - cast_in
        if change.get("loss_chunks", 1) > 1:
            share = 0.5 if change.get("precision") == "bf16" and precision == "fp32" else 1.0
            moving -= min(moving, share * self.logits * (1 - 1 / change["loss_chunks"]))
        if change.get("micro_batch", micro_batch) < micro_batch:
            moving *= change["micro_batch"] / micro_batch
            alive = g if change.get("accumulate", 1) > 1 else alive
        update = p + g + o + self.update - self.parameters - self.gradients - self.optimizer
        update -= self.foreach if "optimizer" in change else 0
        highest = max(update, p + o + alive + moving + cast)
        loose = self.reserved - self.allocated - (self.loose if change.get("expandable_segments") else 0)
        beside = self.beside_many if times > 1 else self.beside
        return int(highest * (1 + max(0, loose) / self.allocated)) + beside


def outlook(trace: types.Trace, memory: Memory, cluster: Cluster, overhead: Overhead, *, expandable: bool) -> Outlook:
    """From the trace of a step and what was predicted of it."""
    in_update, elsewhere = _peaks(trace, sizes_for(cluster, overhead))
    blocks = _blocks(trace)
    total = {role: sum(s.nbytes for s in trace.storages.values() if s.role == role and not s.host) for role in _HELD}
    weights = sum(trace.storages[number].nbytes for number in trace.resident)
    alive = memory.categories.get("gradients", 0) if elsewhere >= in_update else total[types.GRADIENT]
    copies = _casts(trace)
    cast = sum(trace.storages[number].nbytes for number in copies)
    inside = sum(trace.storages[number].nbytes for number in copies if _block(trace.storages[number].module, blocks))
    moving = max(0, elsewhere - weights - total[types.OPTIMIZER] - alive - cast)
    linear, unit = _weights(trace)
    return Outlook(
        parameters=weights, gradients=total[types.GRADIENT], alive=alive, optimizer=total[types.OPTIMIZER], moving=moving,
        cast=cast, cast_in_blocks=inside, full=recompute_saves(trace), selective=recompute_saves(trace, KEPT),
        linear=linear, unit=unit, update=in_update, logits=min(moving, memory.categories.get("logits", 0)),
        rows=_rows(trace),
        foreach=max(0, min(in_update - elsewhere, in_update - weights - total[types.GRADIENT] - total[types.OPTIMIZER])),
        loose=0 if expandable else max(0, memory.reserved_bytes - _with_growing_segments(trace, cluster, overhead)),
        allocated=max(1, memory.allocated_bytes), reserved=memory.reserved_bytes,
        beside=overhead.context_bytes + overhead.nccl_for(cluster), single="ranks" not in trace.meta,
        beside_many=overhead.context_bytes + overhead.nccl_for(replace(cluster, devices_per_node=max(2, cluster.devices_per_node))),
        batch_norm=any("batch_norm" in op.name for op in trace.ops()),
    )  # fmt: skip


_HELD = (types.GRADIENT, types.OPTIMIZER)


def _peaks(trace: types.Trace, sizes: Sizes) -> tuple[int, int]:
    """Highest allocated bytes while the optimizer works, which fewer activations do not lower, and elsewhere."""
    replay, peaks = Replay(trace, sizes), [0, 0]

    def look(op: types.Op | None, _: tuple[int, ...]) -> None:
        where = int(op is None or op.phase != "update")
        peaks[where] = max(peaks[where], replay.allocator.allocated)

    replay.watch(look)
    replay.start()
    for name in dict.fromkeys(run_order(trace)):
        replay.run(name)
    return peaks[0], peaks[1]


def _blocks(trace: types.Trace) -> dict[str, int]:
    """A count of bytes for each block, none so far."""
    return {str(path): 0 for path in trace.meta.get("blocks", ())}  # type: ignore[attr-defined]


def _block(module: str, blocks: Mapping[str, int]) -> str:
    return next((path for path in _prefixes(module) if path in blocks), "")


def _rows(trace: types.Trace) -> int:
    """Tokens that a cross entropy is of, at most."""
    softmaxes = (op for op in trace.programs[_first(trace)].ops if op.name == "aten._log_softmax.default" and op.phase == "forward")
    return max((prod(op.inputs[0].spec.shape[:-1]) for op in softmaxes), default=0)


def _casts(trace: types.Trace) -> list[int]:
    """Copies of weights in a lower precision that live until backward."""
    found = []
    for op in trace.ops():
        if op.name == "aten._to_copy.default" and op.phase == "forward" and op.inputs and op.outputs:
            number = op.outputs[0].storage
            if trace.storages[op.inputs[0].storage].role == types.PARAMETER and trace.storages[number].saved:
                found.append(number)
    return list(dict.fromkeys(found))


def _weights(trace: types.Trace) -> tuple[int, int]:
    """Bytes of weights inside blocks, and of the largest block."""
    each = _blocks(trace)
    for number in trace.resident:
        storage = trace.storages[number]
        path = _block(storage.module, each) if storage.role == types.PARAMETER else ""
        if path:
            each[path] += storage.nbytes
    return sum(each.values()), max(each.values(), default=0)


def recompute_saves(trace: types.Trace, kept: tuple[str, ...] = ()) -> int:
    """Saved activations inside blocks, less one input per block and one block at work.

    Results of ops that are `kept` stay for backward, also where autograd alone would not save them.
    """
    saved, stays = _blocks(trace), _blocks(trace)
    if not saved:
        return 0
    for storage in trace.storages.values():
        path = _block(storage.module, saved) if storage.saved and storage.role == types.ACTIVATION else ""
        if path:
            saved[path] += storage.nbytes
    for op in trace.programs[_first(trace)].ops if kept else ():
        path = _block(op.module, stays) if op.phase == "forward" and op.name.startswith(kept) else ""
        if path:
            stays[path] += sum(trace.storages[number].nbytes for number in op.allocates)
    inputs = sum(_input_bytes(trace, path) for path in saved)
    return max(0, sum(saved.values()) - max(saved.values()) - inputs - sum(stays.values()))


def _first(trace: types.Trace) -> str:
    return next(name for name in ("micro_first", "forward", *trace.programs) if name in trace.programs)


def _prefixes(module: str) -> Iterator[str]:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        yield ".".join(parts[:length])


def _input_bytes(trace: types.Trace, block: str) -> int:
    """What enters a block: the first activation its first op reads."""
    for op in trace.programs[_first(trace)].ops:
        if op.phase == "forward" and (op.module == block or op.module.startswith(block + ".")) and op.inputs:
            return op.inputs[0].spec.nbytes
    return 0


def _with_growing_segments(trace: types.Trace, cluster: Cluster, overhead: Overhead) -> int:
    replay = Replay(trace, sizes_for(cluster, overhead), expandable=True)
    replay.start()
    for name in dict.fromkeys(run_order(trace)):
        replay.run(name)
    return replay.allocator.peak_reserved
