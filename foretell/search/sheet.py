"""A sheet: what each kind of block of a model costs on one kind of device, at any micro-batch, split and residency.

    keep traces of two micro-batches ─► pieces (sheet_ops) ─► split over tp ranks (sheet_split)
                                     ─► in each residency (sheet_modes) ─► seconds and bytes (sheet_work)

Everything is worked out when it is first asked for and kept. Plain data, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from foretell.errors import UserError
from foretell.hardware import overhead
from foretell.hardware.types import Cluster, Overhead
from foretell.lower.batch import Unlike
from foretell.lower.fsdp.units import Way
from foretell.plan.precision import MIXED
from foretell.price.machine import machine
from foretell.price.speeds import Options, profile_for
from foretell.price.time import Machine
from foretell.search.coarse import Coarse, coarse
from foretell.search.sheet_compile import Compiled, Faster, judged
from foretell.search.sheet_context import Context
from foretell.search.sheet_expert import spread
from foretell.search.sheet_modes import KEEP, MODES, RECOMPUTE, in_mode, takes_selective
from foretell.search.sheet_ops import AFTER, BEFORE, Material, Source, Weights
from foretell.search.sheet_work import (
    PLAIN_HOST,
    SHARED_HOST,
    SHARED_SPLIT_HOST,
    SPLIT_HOST,
    SPREAD_HOST,
    Prices,
    Work,
    rounded,
    scaled,
)
from foretell.search.short import Item, Origin, Stacker
from foretell.simulate.memory.memory import sizes_for
from foretell.simulate.parts import TORCH, sequence_length
from foretell.trace.types import Op, Ref, TensorSpec, Trace
from foretell.units import DTYPE_BYTES

Key = str | int
SourceOf = Callable[[str, int], Source]
"""Precision of the recipe and tp degree → the traces; raises a UserError where the model cannot be split so."""
GRID = 64.0
"""The update is priced at whole powers of this share of the parameters, and in between by straight lines."""


@dataclass(frozen=True)
class Unit:
    """Bytes and copies of the parameters of a piece, sharded over so many ranks."""

    tensors: int
    trained: int
    kept: int
    """Of this rank's shards of parameters."""
    state: int
    """Of this rank's optimizer state."""
    whole: int
    """Of whole parameters as compute sees them."""
    gather_input: int
    gather_output: int
    reduce_input: int
    reduce_output: int
    """0 where the gradient itself is the output."""
    gradient: int
    """Of this rank's gradients, as they are kept."""
    whole_gradient: int
    """Of whole gradients, as backward makes them."""
    partial: int
    """What a scatter leaves to be summed over replicas, or the whole gradients in the dtype of the sum."""
    summed: int
    """Of whole gradients in the dtype in which they are summed."""
    copy_out: float
    copy_in: float
    adding: float
    """Seconds to add whole gradients to those that are there."""
    experts: Unit | None = None
    """Of this piece's experts, part of the above: gathered and scattered among fewer ranks, after the rest or before."""
    ranks: int = 1
    """Over which it is sharded."""

    @property
    def rest(self) -> Unit:
        """Without the experts, as far as messages go."""
        mine = self.experts
        if mine is None:
            return self
        return replace(
            self, experts=None, tensors=self.tensors - mine.tensors, trained=self.trained - mine.trained,
            gather_output=self.gather_output - mine.gather_output, gather_input=self.gather_input - mine.gather_input,
            reduce_input=self.reduce_input - mine.reduce_input, partial=self.partial - mine.partial,
        )  # fmt: skip

    @property
    def parts(self) -> tuple[Unit, ...]:
        """What is gathered at once, in the order of forward."""
        return (self,) if self.experts is None else (self.rest, self.experts)

    @property
    def largest_reduced(self) -> int:
        """Bytes of the largest message of gradients."""
        return self.reduce_input if self.experts is None else max(part.reduce_input for part in self.parts)


@dataclass
class Works:
    """A model at one precision, micro-batch and tensor degree."""

    material: Material
    prices: Prices
    reduce: str | None
    """Dtype in which gradients are summed over ranks; None: their own."""
    slots: float
    """Optimizer state over the parameters it is for."""
    derived: bool = False
    """Layers split by rule, not traced split."""
    host: tuple[float, float, float] = PLAIN_HOST
    """How much longer the host takes over forward and backward than over the ops that are here, and how many ops there are."""
    trace: Trace | None = None
    """What compiling is judged by."""
    origin: Origin = None  # type: ignore[assignment]
    """Whose parameters and update it has."""
    _work: dict[tuple[Key, str, str], Work] = field(default_factory=dict)
    _coarse: dict[tuple[Key, str, bool], Coarse] = field(default_factory=dict)
    _stacker: Stacker | None = None
    _units: dict[tuple[Key, int, bool], Unit] = field(default_factory=dict)
    _updates: dict[tuple[int, bool], float] = field(default_factory=dict)
    _compiled: dict[str, Compiled] = field(default_factory=dict)
    """Shared by all micro-batches."""
    way: str = "none"
    """How the model is compiled."""

    def compiling(self, way: str) -> Works:
        """The same model, compiled in another way."""
        if way == self.way:
            return self
        if way == "none" and self._plain is not None:
            return self._plain
        found = self._others.get(way)
        if found is None:
            found = self._others[way] = replace(self, way=way, _work={}, _coarse={}, _others={})
            found._plain = self
        return found

    _others: dict[str, Works] = field(default_factory=dict)
    _plain: Works | None = None

    def work(self, key: Key, mode: str = KEEP) -> Work:
        """Seconds and bytes of a piece in a residency."""
        found = self._work.get((key, mode, ""))
        if found is None and self._plain is not None:
            found = self._work[key, mode, ""] = scaled(self._plain.work(key, mode), self._share(key))
        if found is None:
            phases = in_mode(self.material.pieces[key], mode, self.material.storages)
            found = self._work[key, mode, ""] = self.prices.work(phases, self.material.storages, host=self.host)
        return found

    def coarse(self, key: Key, mode: str = KEEP, *, split: bool = False) -> Coarse:
        """A piece in few ops; what runs before and after the blocks stays op by op, unless it is compiled."""
        found = self._coarse.get((key, mode, split))
        if found is None:
            phases = in_mode(self.material.pieces[key], mode, self.material.storages)
            around = key in (BEFORE, AFTER)
            found = self._coarse[key, mode, split] = coarse(
                phases, self.material.storages, self.prices, self.work(key, mode), split=split, merges=not around or self._plain is not None,
                kept=self._share(key).kept,
            )  # fmt: skip
        return found

    def stack(self, items: Sequence[Item], *, split: bool = False) -> Trace:
        """The step of a short stack of blocks."""
        if self._stacker is None:
            self._stacker = Stacker(self.origin, self.material)
        wanted: list[tuple[Key, str]] = [(BEFORE, KEEP), (AFTER, KEEP), *((item.kind, item.mode) for item in items)]
        return self._stacker.trace(items, {key: self.coarse(*key, split=split) for key in dict.fromkeys(wanted)})

    def _share(self, key: Key) -> Faster:
        """What compiling leaves of a piece."""
        if self._plain is None or self.prices.machine is None or self.trace is None:
            return Faster()
        if self.way not in self._compiled:
            self._compiled[self.way] = judged(self.trace, self.prices.machine, self.way)
        share = self._compiled[self.way]
        return share.rest if key in (BEFORE, AFTER) else share.block

    def modes(self, key: Key) -> tuple[str, ...]:
        """Residencies that a piece can be in."""
        return MODES if takes_selective(self.material.pieces[key].forward) else (KEEP, RECOMPUTE)

    @property
    def boundary(self) -> int:
        """Bytes that a block hands to the next."""
        return sum(spec.nbytes for spec in self.material.boundary)

    def unit(self, key: Key, ranks: int, *, data: bool) -> Unit:
        """Parameters of a piece; "root" for those before and after the blocks together."""
        found = self._units.get((key, ranks, data))
        if found is None:
            found = self._units[key, ranks, data] = self._unit(key, ranks, data)
        return found

    def _weights(self, key: Key) -> Weights:
        known = self.material.weights
        if key == "root":
            return Weights((*known[BEFORE].trained, *known[AFTER].trained), (*known[BEFORE].frozen, *known[AFTER].frozen))
        if key == "none":
            return Weights()
        if key == "tail":
            return Weights((*self.material.shared, *known[AFTER].trained), known[AFTER].frozen)
        return known[key]

    def _unit(self, key: Key, ranks: int, data: bool) -> Unit:
        weights = self._weights(key)
        rest = self._sharded(weights.all, weights.trained, ranks, data, inside=False)
        if not weights.experts:
            return rest
        mine = self._sharded(weights.experts, weights.experts, max(1, ranks // weights.groups), data, inside=True)
        summed = {one.name: getattr(rest, one.name) + getattr(mine, one.name) for one in fields(Unit) if one.name not in ("experts", "ranks")}
        return Unit(**summed, experts=mine, ranks=ranks)

    def shards(self, key: Key, ranks: int, *, data: bool) -> list[tuple[TensorSpec, TensorSpec, bool, int]]:
        """Of every parameter of a piece: whole, this rank's part as it is kept, whether it is trained, over how many ranks."""
        weights, wide = self._weights(key), self.material.wide if data else {}
        found = []
        for specs, trained, over, inside in (
            (weights.trained, True, ranks, False), (weights.frozen, False, ranks, False),
            (weights.experts, True, max(1, ranks // weights.groups), True),
        ):  # fmt: skip
            way = Way(ranks=over, inside=inside)
            found += [(spec, TensorSpec(way.part(spec.shape), wide.get(spec.dtype, spec.dtype)), trained, over) for spec in specs]
        return found

    def _sharded(
        self, every: Sequence[TensorSpec], trained: Sequence[TensorSpec], ranks: int, data: bool, *, inside: bool
    ) -> Unit:  # fmt: skip
        wide, way = self.material.wide if data else {}, Way(ranks=ranks, inside=inside)

        def part(spec: TensorSpec) -> TensorSpec:
            return TensorSpec(way.part(spec.shape), wide.get(spec.dtype, spec.dtype))

        def low(spec: TensorSpec) -> int:
            return part(spec).numel * DTYPE_BYTES[spec.dtype]

        def added(spec: TensorSpec) -> str:
            return self.reduce or spec.dtype

        flat = sum(part(spec).numel * DTYPE_BYTES[added(spec)] for spec in trained)
        alone = inside and ranks == 1  # copied where a gather would have put them
        gathered = ranks * sum(map(low, every))
        cast = sum(low(spec) for spec in every if part(spec).dtype != spec.dtype)
        apart = any(added(spec) != wide.get(spec.dtype, spec.dtype) for spec in trained)
        out, in_, adding = self._copies(every, trained, ranks, gathered, flat) if data else (0.0, 0.0, self._adding(trained))
        return Unit(
            tensors=len(every), trained=len(trained), kept=sum(rounded(part(spec).nbytes) for spec in every),
            state=round(sum(rounded(part(spec).nbytes) for spec in trained) * self.slots),
            whole=sum(rounded(ranks * low(spec)) for spec in every), gather_input=rounded(cast) * (not alone),
            gather_output=rounded(gathered) * (not alone),
            reduce_input=rounded(ranks * flat), reduce_output=rounded(flat) if apart else 0,
            gradient=rounded(sum(part(spec).nbytes for spec in trained)),
            whole_gradient=sum(rounded(spec.nbytes) for spec in trained), partial=rounded(flat),
            summed=sum(rounded(spec.numel * DTYPE_BYTES[added(spec)]) for spec in trained),
            copy_out=out, copy_in=in_, adding=adding, ranks=ranks,
        )  # fmt: skip

    def _copies(
        self, every: Sequence[TensorSpec], trained: Sequence[TensorSpec], ranks: int, gathered: int, flat: int
    ) -> tuple[float, float, float]:
        """Seconds to copy whole parameters out of a gather's buffer, gradients into a scatter's, and to add gradients."""
        if not every:
            return 0.0, 0.0, 0.0
        whole = tuple(Ref(0, spec) for spec in every)
        dtype = every[0].dtype
        if ranks > 1:
            buffer = TensorSpec((gathered // DTYPE_BYTES[dtype],), dtype)
            out = [_op("foretell.all_gather_copy_out", (Ref(0, buffer),), whole)]
        else:
            out = [_op("aten.copy_.default", (ref, ref._replace(storage=1)), (ref,)) for ref in whole]
            if self.material.wide:
                wide = [ref._replace(spec=TensorSpec(ref.spec.shape, self.material.wide.get(ref.spec.dtype, ref.spec.dtype))) for ref in whole]
                out += [_op("aten._to_copy.default", (one,), (ref,)) for one, ref in zip(wide, whole, strict=True)]
        summed = self.reduce or dtype
        target = Ref(0, TensorSpec((ranks * flat // DTYPE_BYTES[summed],), summed))
        pieces = tuple(Ref(0, TensorSpec((spec.nbytes,), "uint8")) for spec in trained)
        in_ = [_op("foretell.reduce_scatter_copy_in", pieces, (target,))] if trained else []
        if ranks == 1 and trained:
            in_.append(_op("aten.copy_.default", (target, target._replace(storage=1)), (target,)))
        widened = tuple(TensorSpec(spec.shape, summed) for spec in trained)
        adds = [_op("aten.add_.Tensor", (Ref(0, two), Ref(1, one)), (Ref(0, two),)) for one, two in zip(trained, widened, strict=True)]
        known = self.prices.of((out, in_, adds))
        return (
            sum(known[id(op)][1] for op in out), sum(known[id(op)][1] for op in in_), sum(known[id(op)][1] for op in adds)
        )

    def _adding(self, trained: Sequence[TensorSpec]) -> float:
        ops = [_op("aten.add_.Tensor", (Ref(0, spec), Ref(1, spec)), (Ref(0, spec),)) for spec in trained]
        return sum(seconds for _, seconds in self.prices.of((ops,)).values())

    def update(self, share: float, *, data: bool) -> float:
        """Seconds of an update of this share of the parameters' elements."""
        import math

        share /= int(str(self.material.meta.get("tp", 1))) if self.derived else 1
        place = max(0.0, -math.log(max(share, 1e-9), GRID))
        low = math.floor(place)
        first, second = self._update(low, data), self._update(low + 1, data)
        high_share, low_share = GRID**-low, GRID ** -(low + 1)
        return second + (first - second) * (share - low_share) / (high_share - low_share)

    def _update(self, power: int, data: bool) -> float:
        found = self._updates.get((power, data))
        if found is None:
            wide = self.material.wide if data else {}
            share = GRID**-power

            def kept(ref: Ref) -> Ref:
                shape = ref.spec.shape
                smaller = (max(1, round(shape[0] * share)), *shape[1:]) if shape else shape
                return Ref(ref.storage, TensorSpec(smaller, wide.get(ref.spec.dtype, ref.spec.dtype)))

            ops = [
                replace(op, inputs=tuple(map(kept, op.inputs)), outputs=tuple(map(kept, op.outputs)))
                for op in self.material.update if op.inputs or op.outputs
            ]  # fmt: skip
            found = self._updates[power, data] = sum(seconds for _, seconds in self.prices.of((ops,)).values())
        return found


def _op(name: str, inputs: tuple[Ref, ...], outputs: tuple[Ref, ...]) -> Op:
    return Op(name, inputs, outputs, "", "backward", 0)


class Sheet:
    """What a model costs, kind by kind, on one kind of device."""

    def __init__(
        self, source_of: SourceOf, device: Machine | None, cluster: Cluster, *, about: Mapping[str, Any] | None = None,
        optimizer: str = "adamw-fused", clip: float | None = 1.0, first: str = "fsdp-bf16",
    ) -> None:  # fmt: skip
        self.source_of, self.machine, self.cluster = source_of, device, cluster
        self.about: Mapping[str, Any] = dict(about or {})
        self.optimizer, self.clip = optimizer, clip
        self.extra: Overhead = overhead(cluster.device, TORCH)
        self.prices = Prices(device, sizes_for(cluster, self.extra))
        self.material = material = source_of(first, 1).first
        self.blocks, self.kinds = material.blocks, material.kinds
        self.tied = bool(material.shared)
        self.length = sequence_length_of(material)
        self._works: dict[tuple[str, int, int, int, int], Works | UserError] = {}
        self._compiled: dict[str, dict[str, Compiled]] = {}
        self._units: dict[tuple[str, int, int], dict[tuple[Key, int, bool], Unit]] = {}
        self._updates: dict[tuple[str, int], dict[tuple[int, bool], float]] = {}
        self.known: dict[Any, Any] = {}
        """What quick costs keep between calls."""
        self.first = first
        self.traces: Any = None
        """Where the traces come from, if they are asked for as they are needed."""
        self.half_of: Callable[[str], Source] | None = None
        """Precision of the recipe → the traces of samples half as long; for ranks that share positions."""
        self.experts: tuple[tuple[str, ...], int] = ((), 0)
        """Modules that hold stacks of experts, and how many each holds; for ranks that share them."""
        self._contexts: dict[str, Context] = {}
        self._origins: dict[Source, Origin] = {}

    def on(self, cluster: Cluster, options: Options | None = None) -> Sheet:
        """The same model on another kind of device, from the same traces."""
        how = options or Options()
        found = Sheet(
            self.source_of, machine(cluster.device, profile_for(cluster, how.profile_of)), cluster, about=self.about,
            optimizer=self.optimizer, clip=self.clip, first=self.first,
        )  # fmt: skip
        found.traces, found.half_of, found.experts = self.traces, self.half_of, self.experts
        return found

    def works(
        self, recipe: str, micro_batch: int, tp: int = 1, precision: str = "bf16-mixed", *, cp: int = 1, ep: int = 1
    ) -> Works:
        """The model at one precision, micro-batch and degree of each split; a UserError where it cannot be split so, Unlike
        where the whole is not on straight lines."""
        key = (recipe, micro_batch, tp, cp, ep)
        found = self._works.get(key)
        if found is None:
            try:
                found = self._made(recipe, micro_batch, tp, precision, cp, ep)
            except UserError as error:
                found = error
            except Unlike as error:
                if tp * cp * ep == 1:
                    raise
                found = UserError(f"micro-batch {micro_batch} cannot be derived: {error}", "trace it itself")
            self._works[key] = found
        if isinstance(found, UserError):
            raise found
        return found

    def _made(self, recipe: str, micro_batch: int, tp: int, precision: str, cp: int, ep: int) -> Works:
        from foretell.search.sheet_split import split

        derived = False
        try:
            if cp * ep > 1:
                raise KeyError(tp)
            material = self.source_of(recipe, tp).at(micro_batch)
        except KeyError:
            material, derived = split(self._whole(recipe, micro_batch, cp, ep), tp), tp > 1
        source = self.source_of(recipe, 1 if cp * ep > 1 or derived else tp)
        if source not in self._origins:
            self._origins[source] = Origin(source.trace, source.first)
        whole = self.source_of(recipe, 1).first
        shared = (SHARED_HOST, SHARED_SPLIT_HOST) if cp > 1 else (SPREAD_HOST if ep > 1 else PLAIN_HOST, SPLIT_HOST)
        return Works(
            material=material, prices=self.prices, reduce="float32" if precision in MIXED else None,
            slots=whole.slots, derived=derived, host=shared[derived], trace=self.source_of(recipe, 1).trace,
            origin=self._origins[source],
            _compiled=self._compiled.setdefault(recipe, {}), _units=self._units.setdefault((recipe, tp, ep), {}),
            _updates=self._updates.setdefault((recipe, 1 if derived else tp), {}),
        )  # fmt: skip

    def _whole(self, recipe: str, micro_batch: int, cp: int, ep: int) -> Material:
        """With the layers whole: samples or experts may be shared."""
        if cp > 1:
            return self._context(recipe).at(micro_batch, cp)
        found = self.source_of(recipe, 1).at(micro_batch)
        return spread(found, ep, *self.experts) if ep > 1 else found

    def _context(self, recipe: str) -> Context:
        if recipe not in self._contexts:
            if self.half_of is None or not self.length:
                raise UserError("samples have no positions that ranks could share", "use cp 1")
            half = self.half_of(recipe)
            if sequence_length_of(half.first) != self.length // 2:
                raise UserError("what half a sample costs is not known: the model takes no other length", "use cp 1")
            self._contexts[recipe] = Context(self.source_of(recipe, 1), half, self.length)
        return self._contexts[recipe]

    def offered(self, recipe: str, tp: int) -> str | None:
        """Why a tensor degree is not offered; None where it is."""
        try:
            self.works(recipe, 2, tp)
        except UserError as error:
            return error.problem
        return None


def sequence_length_of(material: Material) -> int | None:
    """Tokens of a sample, where the batch is a table of tokens."""
    batch = material.meta.get("batch", [])
    assert isinstance(batch, Sequence)
    if not batch:
        return None
    rows_ = batch[0][1] if len(batch[0]) > 1 else 0
    return sequence_length(Trace(programs={}, schedule={}, storages={}, resident=(), meta=material.meta), rows_)


def sheet_of(
    traces: Mapping[tuple[str, int], tuple[Trace, Trace | None]], cluster: Cluster, options: Options | None = None, *,
    sizes: tuple[int, int] = (2, 4), **more: Any,
) -> Sheet:  # fmt: skip
    """A sheet from keep traces of two micro-batches, by precision of the recipe and tensor degree."""
    how = options or Options()
    sources = {key: Source(small, large, sizes) for key, (small, large) in traces.items()}
    known = machine(cluster.device, profile_for(cluster, how.profile_of))
    return Sheet(lambda recipe, tp: sources[recipe, tp], known, cluster, first=next(iter(sources))[0], **more)
