"""A sheet: what each kind of block of a model costs on one kind of device, at any micro-batch, split and residency.

    keep traces of two micro-batches ─► pieces (sheet_ops) ─► split over tp ranks (sheet_split)
                                     ─► in each residency (sheet_modes) ─► seconds and bytes (sheet_work)

Everything is worked out when it is first asked for and kept. Plain data, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import UserError
from foretell.hardware import overhead
from foretell.hardware.overheads import Overhead
from foretell.hardware.types import Cluster
from foretell.lower.batch import BatchMismatch
from foretell.lower.expert import EXPERTS
from foretell.lower.fsdp.units import FsdpSharding
from foretell.price.machine import machine
from foretell.price.speeds import Options, profile_for
from foretell.price.time import Machine
from foretell.search.block_costs.compiled import Compiled, CompileGain, entered, judged
from foretell.search.block_costs.context import ContextCosts
from foretell.search.block_costs.expert import spread
from foretell.search.block_costs.kept import Costs
from foretell.search.block_costs.ops import AFTER, BEFORE, Material, PieceSource
from foretell.search.block_costs.residency import KEEP, MODES, RECOMPUTE, in_mode, takes_selective
from foretell.search.block_costs.work import (
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
from foretell.search.estimate.coarse import Coarse, coarse
from foretell.search.estimate.short import LINK, Item, Origin, Stacker
from foretell.simulate.memory.memory import fitted_ops, sizes_for
from foretell.simulate.parts import TORCH, sequence_length
from foretell.trace.cuda.versions import widening
from foretell.trace.doubts import memory_widening
from foretell.trace.types import TensorSpec, Trace
from foretell.units import DTYPE_BYTES

Key = str | int
SourceOf = Callable[[str, int], PieceSource]
"""Precision of the recipe and tp degree → the traces; raises a UserError where the model cannot be split so."""


@dataclass
class Works:
    """A model at one precision, micro-batch and tensor degree."""

    material: Material
    prices: Prices
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
    known: dict[Any, Any] = field(default_factory=dict)
    """What quick costs keep between calls."""
    _compiled: dict[str, Compiled] = field(default_factory=dict)
    """Shared by all micro-batches."""
    way: str = "none"
    """How the model is compiled."""
    about: tuple[object, ...] = ()
    """Precision of its traces, micro-batch and degree of each split."""

    def compiling(self, way: str) -> Works:
        """The same model, compiled in another way."""
        if way == self.way:
            return self
        if way == "none" and self._plain is not None:
            return self._plain
        found = self._others.get(way)
        if found is None:
            found = self._others[way] = replace(self, way=way, _work={}, _coarse={}, _others={}, known={})
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
            if not self._work:  # many ops are priced at once in little more time than one
                self.prices.of(ops for piece in self.material.pieces.values() for ops in (piece.forward, piece.backward))
            phases = in_mode(self.material.pieces[key], mode, self.material.storages)
            found = self._work[key, mode, ""] = self.prices.work(phases, self.material.storages, host=self.host)
        return found

    def taken(self, key: Key, mode: str) -> tuple[bool, bool, int]:
        """How large a piece is: whether it has parameters, whether its forward keeps something, most bytes while it runs."""
        work = self.work(key, mode)
        return work.gradients > 0, work.forward.net > 0, max(work.forward.peak, work.backward.peak) + work.gradients

    def coarse(self, key: Key, mode: str = KEEP, *, split: bool = False) -> Coarse:
        """A piece in few ops; what runs before and after the blocks stays op by op, unless it is compiled. And so do blocks whose
        backward is run in two passes (`split`): what lies between those decides where gaps are left in memory."""
        found = self._coarse.get((key, mode, split))
        if found is None:
            phases = in_mode(self.material.pieces[key], mode, self.material.storages)
            around = key in (BEFORE, AFTER)
            found = self._coarse[key, mode, split] = coarse(
                phases, self.material.storages, self.prices, self.work(key, mode), merges=not split and (not around or self._plain is not None),
                kept=self._share(key).kept, apart=_experts(self.material),
            )  # fmt: skip
        return found

    def stack(self, items: Sequence[Item], *, split: bool = False) -> Trace:
        """The step of a short stack of blocks."""
        if self._stacker is None:
            self._stacker = Stacker(self.origin, self.material)
        wanted: list[tuple[Key, str]] = [(BEFORE, KEEP), (AFTER, KEEP), *((item.kind, item.mode) for item in items if item.kind != LINK)]
        found = self._stacker.trace(items, {key: self.coarse(*key, split=split) for key in dict.fromkeys(wanted)})
        return found if self._plain is None or self.trace is None else replace(found, meta={**found.meta, **entered(self.trace, self.way)})

    def _share(self, key: Key) -> CompileGain:
        """What compiling leaves of a piece."""
        if self._plain is None or self.prices.machine is None or self.trace is None:
            return CompileGain()
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

    def state(self, key: Key, ranks: int, *, data: bool, summed: str | None = None, whole: bool = False) -> int:
        """Bytes of a piece's parameters, gradients and optimizer state on one of the ranks that share them.

        `summed`: whole gradients are added up in that dtype and shared at the end; `whole`: parameters stay whole after forward.
        """
        weights, wide = self.material.weights[key], self.material.wide if data else {}
        shares = ((weights.trained, True, FsdpSharding(ranks=ranks)), (weights.frozen, False, FsdpSharding(ranks=ranks)),
                  (weights.experts, True, FsdpSharding(ranks=max(1, ranks // weights.groups), inside=True)))  # fmt: skip
        found = 0.0
        for specs, trained, way in shares:
            for spec in specs:
                mine = TensorSpec(way.part(spec.shape), wide.get(spec.dtype, spec.dtype))
                found += rounded(mine.nbytes) * (1 + (self.slots + (summed is None) if trained else 0))
                found += rounded(spec.numel * DTYPE_BYTES[summed]) if trained and summed is not None else 0
                found += rounded(spec.nbytes) * whole
        return round(found)

    def whole(self, key: Key) -> int:
        """Bytes of a piece's parameters as compute sees them."""
        weights = self.material.weights[key]
        return sum(rounded(spec.nbytes) for spec in (*weights.trained, *weights.frozen))


def _experts(material: Material) -> Sequence[str]:
    """Modules that are gathered each by itself."""
    found = material.meta.get(EXPERTS, ())
    assert isinstance(found, Sequence)
    return found


class Sheet:
    """What a model costs, kind by kind, on one kind of device."""

    def __init__(
        self, source_of: SourceOf, device: Machine | None, cluster: Cluster, *, about: Mapping[str, Any] | None = None,
        optimizer: str = "adamw-fused", clip: float | None = 1.0, first: str = "fsdp-bf16",
        state_format: str = "fp32",
    ) -> None:  # fmt: skip
        self.source_of, self.machine, self.cluster = source_of, device, cluster
        self.about: Mapping[str, Any] = dict(about or {})
        self.optimizer, self.clip, self.state_format = optimizer, clip, state_format
        self.extra: Overhead = overhead(cluster.device, TORCH)
        self.prices = Prices(device, sizes_for(cluster, self.extra))
        self.material = material = source_of(first, 1).first
        self.blocks, self.kinds = material.blocks, material.kinds
        self.tied = bool(material.shared)
        self.fitted = fitted_ops(source_of(first, 1).trace)
        self.widening, self.memory_widening = (of(source_of(first, 1).trace.meta) for of in (widening, memory_widening))
        self.length = sequence_length_of(material)
        self._works: dict[tuple[str, int, int, int, int], Works | UserError] = {}
        self._compiled: dict[str, dict[str, Compiled]] = {}
        self.known: dict[Any, Any] = {}
        """What quick costs keep between calls."""
        self.costs = Costs()
        """Of short stacks."""
        self.first = first
        self.traces: Any = None
        """Where the traces come from, if they are asked for as they are needed."""
        self.half_of: Callable[[str], PieceSource] | None = None
        """Precision of the recipe → the traces of samples half as long; for ranks that share positions."""
        self.experts: tuple[tuple[str, ...], int] = ((), 0)
        """Modules that hold stacks of experts, and how many each holds; for ranks that share them."""
        self._contexts: dict[str, ContextCosts] = {}

    def on(self, cluster: Cluster, options: Options | None = None) -> Sheet:
        """The same model on another kind of device, from the same traces."""
        how = options or Options()
        found = Sheet(
            self.source_of, machine(cluster.device, profile_for(cluster, how.profile_of)), cluster, about=self.about,
            optimizer=self.optimizer, clip=self.clip, first=self.first, state_format=self.state_format,
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
            except BatchMismatch as error:
                if tp * cp * ep == 1:
                    raise
                found = UserError(f"micro-batch {micro_batch} cannot be derived: {error}", "trace it itself")
            self._works[key] = found
        if isinstance(found, UserError):
            raise found
        return found

    def _made(self, recipe: str, micro_batch: int, tp: int, precision: str, cp: int, ep: int) -> Works:
        derived = False
        try:
            if cp * ep > 1:
                raise KeyError(tp)
            material = self.source_of(recipe, tp).at(micro_batch)
        except KeyError:
            material, derived = self._split(recipe, micro_batch, tp, cp, ep), tp > 1
        source = self.source_of(recipe, 1 if cp * ep > 1 or derived else tp)
        if Origin not in source.known:
            source.known[Origin] = Origin(source.trace, source.first)
        whole = self.source_of(recipe, 1).first
        shared = (SHARED_HOST, SHARED_SPLIT_HOST) if cp > 1 else (SPREAD_HOST if ep > 1 else PLAIN_HOST, SPLIT_HOST)
        return Works(
            material=material, prices=self.prices,
            slots=whole.slots, derived=derived, host=shared[derived], trace=self.source_of(recipe, 1).trace,
            origin=source.known[Origin],
            _compiled=self._compiled.setdefault(recipe, {}), about=(recipe, micro_batch, tp, cp, ep),
        )  # fmt: skip

    def _split(self, recipe: str, micro_batch: int, tp: int, cp: int, ep: int) -> Material:
        """With layers split over tp ranks, and samples or experts shared; the same for all devices."""
        from foretell.search.block_costs.tensor import split

        known, key = self.source_of(recipe, 1).known, (micro_batch, tp, cp, ep, self.experts)
        if key not in known:
            known[key] = split(self._whole(recipe, micro_batch, cp, ep), tp)
        found: Material = known[key]
        return found

    def _whole(self, recipe: str, micro_batch: int, cp: int, ep: int) -> Material:
        """With the layers whole: samples or experts may be shared."""
        if cp > 1:
            return self._context(recipe).at(micro_batch, cp)
        found = self.source_of(recipe, 1).at(micro_batch)
        return spread(found, ep, *self.experts) if ep > 1 else found

    def _context(self, recipe: str) -> ContextCosts:
        if recipe not in self._contexts:
            if self.half_of is None or not self.length:
                raise UserError("samples have no positions that ranks could share", "use cp 1")
            half = self.half_of(recipe)
            if sequence_length_of(half.first) != self.length // 2:
                raise UserError("what half a sample costs is not known: the model takes no other length", "use cp 1")
            self._contexts[recipe] = ContextCosts(self.source_of(recipe, 1), half, self.length)
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
    sources = {key: PieceSource(small, large, sizes) for key, (small, large) in traces.items()}
    known = machine(cluster.device, profile_for(cluster, how.profile_of))
    return Sheet(lambda recipe, tp: sources[recipe, tp], known, cluster, first=next(iter(sources))[0], **more)
