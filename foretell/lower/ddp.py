"""One rank of PyTorch's DistributedDataParallel, from the trace of one device: buckets beside gradients, sums over ranks.

    backward   │ block 1' │ copy │ block 0' │ copy │ copy back │ update │
                                 └ sum bucket 0 ┘  └ sum bucket 1 ┘

Buckets are made with the wrapper and stay: as many bytes as all trained parameters have. A gradient is copied into its
bucket when it is there; a bucket that is full is summed beside compute; at the end of backward gradients are copied back.
With `gradient_as_bucket_view` the copy takes the gradient's place, which is given back. A micro-batch under `no_sync` leaves
gradients where they are: only the one that sums fills buckets. After the first step buckets are in the order in which
gradients come (`torch.nn.parallel.distributed` of torch 2.11 to 2.13): the first closes at 1 MiB, the others at 25 unless said.

Buffers are sent from rank 0 before each forward whose gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from foretell.lower.fsdp.units import DP_REPLICATE, FIRST, LAST, Storages
from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, TensorSpec, Trace

NEXT, ROUND = "micro_next", "round"
FIRST_BUCKET = 2**20
"""Bytes at which the first bucket closes, so that sums begin early."""
BUCKET = 25 * 2**20
WORLD = "world"
"""All ranks, as an axis: what is sent there is waited for by what comes next."""


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """What DistributedDataParallel was told."""

    ranks: int
    paths: tuple[str, ...] = ("",)
    """Modules that are wrapped; what others hold is not summed."""
    view: bool = False
    """gradient_as_bucket_view."""
    cap: int = 0
    """Bytes at which a bucket closes; 0: PyTorch's own."""
    last_only: bool = False
    """Only the last micro-batch of a step sums; False: each does."""
    nbytes: int = 0
    """Of all buckets, where some trained parameters get no gradient: there is room for them too."""
    unused: bool = False
    """find_unused_parameters: that room is summed as well."""
    buffers: bool = True
    """broadcast_buffers."""

    def holds(self, module: str) -> bool:
        return any(not path or module == path or module.startswith(f"{path}.") for path in self.paths)


def replicated(trace: Trace, how: Replicas) -> Trace:
    """The step of one rank that holds all of the model."""
    storages = Storages(trace.storages)
    gradients = [number for number, one in trace.storages.items() if one.role == types.GRADIENT and how.holds(one.module)]
    used = sum(trace.storages[number].nbytes for number in gradients)
    bucket = storages.add(max(used, how.nbytes), types.COMMUNICATION, how.paths[0])
    work = _Work(trace, how, bucket, frozenset(gradients))
    programs, schedule = work.programs()
    return replace(
        trace, programs=programs, schedule=schedule, storages=storages.all, resident=_beside_parameters(trace, bucket),
        meta={**trace.meta, "ranks": how.ranks},
    )  # fmt: skip


def _beside_parameters(trace: Trace, bucket: int) -> tuple[int, ...]:
    """Buckets are made when the model is on the device already, and before the first batch."""
    last = max((place for place, number in enumerate(trace.resident) if trace.storages[number].role != types.INPUT), default=-1)
    return (*trace.resident[: last + 1], bucket, *trace.resident[last + 1 :])


class _Work:
    """Writes the programs of a rank."""

    def __init__(self, trace: Trace, how: Replicas, bucket: int, gradients: frozenset[int]) -> None:
        self.trace, self.how, self.bucket, self.gradients = trace, how, bucket, gradients

    def programs(self) -> tuple[dict[str, Program], dict[str, tuple[tuple[str, int], ...]]]:
        """All of them, and a schedule in which the last micro-batch is one of its own where it alone sums."""
        old, later = self.trace.programs, self.how.last_only and NEXT in self.trace.programs
        done: dict[str, Sequence[Op]] = {}
        for name, program in old.items():
            ops: Sequence[Op] = program.ops
            if name == FIRST:
                ops = ops if later else self._summing(ops, held=False)
            elif name == ROUND:
                ops = self._summing(ops, held=False)
            elif name == NEXT:
                ops = ops if later else self._summing(ops, held=True)
            elif self.how.view:
                ops = [self._on_buckets(op) for op in ops]
            done[name] = ops
        schedule = dict(self.trace.schedule)
        if later:
            done[LAST] = self._summing(old[NEXT].ops, held=False)
            schedule = {run: _last_apart(parts) for run, parts in schedule.items()}
        return {name: Program(name, tuple(ops)) for name, ops in done.items()}, schedule

    def _summing(self, ops: Sequence[Op], held: bool) -> list[Op]:
        """A micro-batch whose gradients are summed; `held`: with views, buckets hold them before it begins."""
        inside = held and self.how.view
        found, ready = [*ops[:1], *self._buffers()], _ready(ops, self.gradients)
        waiting: list[int] = []
        limit = self.how.cap or FIRST_BUCKET
        for position, op in enumerate(ops[1:], 1):
            found.append(self._on_buckets(op) if inside else op)
            for number in ready.get(position, ()):
                found.append(self._into_bucket(number, inside))
                waiting.append(number)
                if self._bytes(waiting) >= limit:
                    found.append(self._sum(waiting))
                    waiting, limit = [], self.how.cap or BUCKET
        more = max(0, self.how.nbytes - self._bytes(list(self.gradients))) if self.how.unused else 0
        if waiting or more:
            found.append(self._sum(waiting, more))
        if not self.how.view:
            found += [self._back(number) for numbers in ready.values() for number in numbers]
        return [one for one in found if one.name]

    def _buffers(self) -> Iterator[Op]:
        """Running statistics as rank 0 has them."""
        kept = [number for number in self.trace.resident if self.trace.storages[number].role == types.BUFFER]
        nbytes = sum(self.trace.storages[number].nbytes for number in kept if self.how.holds(self.trace.storages[number].module))
        if nbytes and self.how.buffers and self.how.ranks > 1:
            yield self._message("foretell.all_gather", nbytes, kept[0], "forward", WORLD)

    def _into_bucket(self, number: int, inside: bool) -> Op:
        storage = self.trace.storages[number]
        source, target = self._refs(number)
        frees = (number,) if self.how.view and not inside else ()
        if inside:  # it lies there, and is divided in place
            return Op("aten.div_.Tensor", (target,), (target,), storage.module, "backward", 0)
        return Op("aten.copy_.default", (target, source), (target,), storage.module, "backward", 0, (), frees)

    def _back(self, number: int) -> Op:
        """When the sums are there; what comes next is the update or the next micro-batch."""
        source, target = self._refs(number)
        return Op("aten.copy_.default", (source, target), (source,), self.trace.storages[number].module, "update", 0)

    def _refs(self, number: int) -> tuple[Ref, Ref]:
        """A gradient, and its place in a bucket."""
        spec = TensorSpec((self.trace.storages[number].nbytes // 4,), "float32")
        return Ref(number, spec), Ref(self.bucket, spec)

    def _sum(self, numbers: Sequence[int], more: int = 0) -> Op:
        if self.how.ranks == 1:
            return Op("", (), (), "", "backward", 0)
        return self._message("foretell.all_reduce", self._bytes(numbers) + more, self.bucket, "backward", DP_REPLICATE)

    def _message(self, name: str, nbytes: int, storage: int, phase: str, axis: str) -> Op:
        ref = Ref(storage, TensorSpec((nbytes,), "uint8"))
        return Op(name, (ref,), (ref,), "", phase, 0, attrs=(f"axis:{axis}", f"ranks:{self.how.ranks}"))

    def _bytes(self, numbers: Sequence[int]) -> int:
        return sum(self.trace.storages[number].nbytes for number in numbers)

    def _on_buckets(self, op: Op) -> Op:
        """With views: a gradient is where its bucket is, and dies with nobody."""
        if self.gradients.isdisjoint((*(ref.storage for ref in (*op.inputs, *op.outputs)), *op.frees)):
            return op
        return replace(
            op, inputs=tuple(map(self._moved, op.inputs)), outputs=tuple(map(self._moved, op.outputs)),
            frees=tuple(number for number in op.frees if number not in self.gradients),
        )  # fmt: skip

    def _moved(self, ref: Ref) -> Ref:
        return ref._replace(storage=self.bucket) if ref.storage in self.gradients else ref


def _ready(ops: Sequence[Op], gradients: frozenset[int]) -> Mapping[int, list[int]]:
    """Position of the op that is the last to write a gradient → the gradients that are there then."""
    last: dict[int, int] = {}
    for position, op in enumerate(ops):
        if op.phase in ("backward", "recompute"):
            for ref in (*op.inputs, *op.outputs):
                if ref.storage in gradients:
                    last[ref.storage] = position
    found: dict[int, list[int]] = {}
    for number, position in sorted(last.items(), key=lambda pair: pair[1]):
        found.setdefault(position, []).append(number)
    return found


def _last_apart(parts: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    changed = [[(NEXT, count - 1), (LAST, 1)] if name == NEXT else [(name, count)] for name, count in parts]
    return tuple((name, count) for piece in changed for name, count in piece if count)
