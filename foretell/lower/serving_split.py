"""A server's step as other engines run it: one rank's part, products of one input joined, what lies between them one kernel.

    traced   norm (8 ops)  q  k  v  rotary (10 ops)  attend  out  add, norm  gate  silu  up  mul  down
    here     norm          qkv      rotary           attend  out  add, norm  gate+up     mul      down
    tp       whole         1/tp     1/tp             1/tp    1/tp, all-reduce whole     1/tp     1/tp, all-reduce

Which products are split by columns and which by rows follows from what they meet: those that attention reads have its heads, the one
that reads attention sums over them; in the rest of a block, into and out of its inner size. Heads of keys and values that are fewer
than ranks are copied. The output layer is split by its words. What decides among experts stays whole. Where ranks have sequences of
their own, only experts are split: tokens of all ranks are gathered before them, and results summed for each rank after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from foretell.errors import ModelError
from foretell.lower.serving import ATTEND, ROWS, TOKENS, StepShape, served_step
from foretell.trace.types import PARAMETER, Op, Program, Ref, TensorSpec, Trace

PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten._grouped_mm.default")
GROUPED = "aten._grouped_mm.default"
EIGHT = "aten._scaled_mm.default"
FUSED = "aten.add.Tensor"
"""What runs of small ops become: it reads what comes from outside and writes what is read outside."""
GATHERS = ("aten.embedding.default", "aten.index.Tensor", "aten.index_select.default")
VIEWS = frozenset("""
view _unsafe_view t transpose permute expand slice select unsqueeze squeeze split split_with_sizes detach alias unbind chunk
_reshape_alias empty_like empty lift_fresh
""".split())  # fmt: skip # noqa: SIM905
COLUMNS, SUMMED, WHOLE, WORDS = "columns", "summed", "whole", "words"
"""How a product's weight is split: its results, what it sums over, not at all, the words of a vocabulary."""


class WeightFormat(NamedTuple):
    """What weights of the blocks take, and how products with them run."""

    name: str
    bits: float
    """Of a weight, with its scales."""
    kernel: str
    """16-bit; 8-bit, 4-bit: products of that many bits; or weights alone: turned to 16 bits on the way."""


PLAIN = WeightFormat("bf16", 16, "16-bit")


@dataclass(frozen=True, kw_only=True)
class EngineForm:
    """What an engine makes of a model."""

    tp: int = 1
    weights: WeightFormat = PLAIN
    kv: str = ""
    """Format of keys and values in pages; empty: the model's."""
    apart: bool = False
    """Each rank has sequences of its own, and all weights but those of experts, of which it has its part."""


def engine_trace(trace: Trace, form: EngineForm) -> Trace:
    """A traced step (lower.serving) as one rank of an engine runs it."""
    if set(trace.programs) != {"forward"}:
        raise ModelError(f"a step of {', '.join(trace.programs)}", "one forward, traced packed")
    return _Engine(trace, form).lowered()


def engine_step(trace: Trace, shape: StepShape, cached: int) -> Trace:
    """`served_step`, with as many experts as its tokens reach."""
    found = served_step(trace, shape, cached)
    programs = {name: Program(name, tuple(_reached(op, shape.tokens) for op in program.ops)) for name, program in found.programs.items()}
    return replace(found, programs=programs)


def reached(experts: int, pairs: int, tokens: int) -> float:
    """Experts that some of the tokens go to, where each goes to `pairs / tokens` of them and all are alike."""
    each = min(experts, pairs / max(1, tokens))
    return float(experts * (1 - (1 - each / experts) ** tokens))


APART = "ranks_apart:"
"""Attribute of experts' products: so many ranks have sequences of their own."""


def _reached(op: Op, tokens: int) -> Op:
    if op.name != GROUPED:
        return op
    rows, weight = op.inputs[0].spec.shape[0], op.inputs[1]
    experts, *sizes = weight.spec.shape
    ranks = next((int(str(attr).removeprefix(APART)) for attr in op.attrs if str(attr).startswith(APART)), 1)
    some = max(1, round(reached(experts, rows, tokens * ranks)))
    return replace(op, inputs=(op.inputs[0], Ref(weight.storage, TensorSpec((some, *sizes), weight.spec.dtype)), *op.inputs[2:]))


class _Engine:
    """One program, walked once to see what meets what, and once to write it."""

    def __init__(self, trace: Trace, form: EngineForm) -> None:
        self.trace, self.form = trace, form
        self.tp = 1 if form.apart else form.tp
        """Ranks that share what is not an expert."""
        self.ops = trace.programs["forward"].ops
        self.storages = dict(trace.storages)
        self.weights = {number for number, one in trace.storages.items() if one.role == PARAMETER}
        self.hidden = self._hidden()
        self.writers, self.readers = self._meetings()
        self.roles = self._roles()
        self.joined = self._joined()
        self.parts: set[int] = set()
        """Storages that hold a rank's part."""
        self.out: list[Op] = []
        self.between: list[tuple[int, Op]] = []
        """Small ops since the last product."""

    def lowered(self) -> Trace:
        later = {one for some in self.joined.values() for one in some[1:]}
        for number, op in enumerate(self.ops):
            if number in later:  # computed with the first of them
                self.between.append((number, Op("foretell.view", (), (), op.module, op.phase, 0, (), op.frees)))
            elif op.name.startswith("foretell.") or op.name == ATTEND or number in self.roles:
                self._flush(number)
                self._one(number, op)
            else:
                self.between.append((number, op))
        self._flush(len(self.ops))
        programs = {"forward": Program("forward", tuple(self.out))}
        return replace(self.trace, programs=programs, storages=self.storages)

    # ------------------------------------------------------------------ what meets what

    def _hidden(self) -> int:
        if not any(op.name == ATTEND for op in self.ops):
            raise ModelError("no attention of the model was taken over", "a decoder whose attention pages can be kept for")
        for op in self.ops:
            if op.name == "aten.embedding.default":
                table = op.inputs[0].storage  # split by its words
                self.storages[table] = self.storages[table]._replace(nbytes=self.storages[table].nbytes // self.tp)
                return op.outputs[0].spec.shape[-1]
        raise ModelError("the model has no embedding of tokens", "a decoder")

    def _meetings(self) -> tuple[Mapping[int, list[int]], Mapping[int, list[int]]]:
        writers, readers = defaultdict(list), defaultdict(list)
        for number, op in enumerate(self.ops):
            for ref in op.inputs:
                readers[ref.storage].append(number)
            for ref in op.outputs:
                writers[ref.storage].append(number)
        return writers, readers

    def _weight(self, op: Op) -> Ref | None:
        """Of a product with one."""
        if op.name not in PRODUCTS:
            return None
        ref = op.inputs[2 if "addmm" in op.name else 1]
        return ref if ref.storage in self.weights else None

    def _roles(self) -> dict[int, str]:
        products = {number for number, op in enumerate(self.ops) if self._weight(op) is not None}
        found: dict[int, str] = {}
        for number, op in enumerate(self.ops):
            if op.name == ATTEND:
                found |= dict.fromkeys(self._around(number, [ref.storage for ref in op.inputs], products, back=True), COLUMNS)
                found |= dict.fromkeys(self._around(number, [ref.storage for ref in op.outputs], products, back=False), SUMMED)
        for number in sorted(products - set(found)):
            found[number] = self._role(number)
        return found

    def _around(self, start: int, storages: Iterable[int], products: set[int], *, back: bool) -> set[int]:
        """The first products before, or after, an op, through whatever small ops lie between."""
        found, seen, waiting = set(), set(), [(storage, start) for storage in storages]
        while waiting:
            storage, at = waiting.pop()
            for number in (self.writers if back else self.readers)[storage]:
                if (number >= at if back else number <= at) or (number, storage) in seen:
                    continue
                seen.add((number, storage))
                op = self.ops[number]
                if number in products:
                    found.add(number)
                elif op.name != ATTEND and not op.name.startswith("foretell."):
                    waiting += [(ref.storage, number) for ref in (op.inputs if back else op.outputs) if ref.storage not in self.weights]
        return found

    def _role(self, number: int) -> str:
        op = self.ops[number]
        weight = self._weight(op)
        assert weight is not None
        inner, outer = weight.spec.shape[-2:]
        if op.outputs[0].spec.shape[0] == ROWS:
            return WORDS
        if op.name != GROUPED and self._chooses(number, op.outputs[0].storage):
            return WHOLE
        if inner == self.hidden and outer != self.hidden:
            return COLUMNS
        return SUMMED if outer == self.hidden and inner != self.hidden else WHOLE

    def _chooses(self, number: int, storage: int) -> bool:
        """Whether experts are chosen by a product's results."""
        near = [one for one in self.readers[storage] if one > number]
        ahead = self.ops[number + 1 : max(near, default=number) + 8]
        return any("topk" in op.name for op in ahead) and self.ops[number].outputs[0].spec.shape[-1] <= 1024

    def _joined(self) -> dict[int, tuple[int, ...]]:
        """Products of one input that are split alike run as one, where the first of them is."""
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for number, role in self.roles.items():
            op = self.ops[number]
            ref = op.inputs[1 if "addmm" in op.name else 0]
            if op.name != GROUPED and role == COLUMNS:
                alike[ref.storage, ref.spec, op.name].append(number)
        return {min(some): tuple(sorted(some)) for some in alike.values() if len(some) > 1}

    # ------------------------------------------------------------------ writing

    def _share(self, size: int, least: int = 1) -> int:
        return max(least, -(-size // self.tp))

    def _one(self, number: int, op: Op) -> None:
        if number in self.roles:
            self._product(number, op)
        elif op.name == ATTEND:
            query, *kept = (Ref(ref.storage, self._heads(ref.spec)) for ref in op.inputs)
            kept = [Ref(ref.storage, TensorSpec(ref.spec.shape, self.form.kv or ref.spec.dtype)) for ref in kept]
            self.parts.add(op.outputs[0].storage)
            self.out.append(replace(op, inputs=(query, *kept), outputs=(Ref(op.outputs[0].storage, self._heads(op.outputs[0].spec)),)))
        else:
            self.out.append(op)

    def _heads(self, spec: TensorSpec) -> TensorSpec:
        tokens, heads, size = spec.shape
        return TensorSpec((tokens, self._share(heads), size), spec.dtype)

    def _product(self, number: int, op: Op) -> None:
        some = self.joined.get(number, (number,))
        role, tp, weight = self.roles[number], self.tp, self._weight(op)
        assert weight is not None
        x = op.inputs[1 if "addmm" in op.name else 0]
        *experts, inner, _ = weight.spec.shape
        outer = sum(self._columns(one) for one in some)
        if role == SUMMED:
            inner = self._share(inner)
            outer = weight.spec.shape[-1]
        rows = x.spec.shape[0]
        dtype = weight.spec.dtype
        apart = self.form.apart and op.name == GROUPED and self.form.tp > 1
        if apart:
            experts = [-(-experts[0] // self.form.tp)]
            if role == COLUMNS:
                self._exchange("foretell.all_gather", x.storage, op)
        given = Ref(x.storage, TensorSpec((rows, inner), dtype))
        made = Ref(op.outputs[0].storage, TensorSpec((rows, outer), dtype))
        held = Ref(weight.storage, TensorSpec((*experts, inner, outer), dtype))
        for one in some:
            self._hold(one, role)
        allocates = tuple(storage for one in some for storage in self.ops[one].allocates)
        name, attrs = op.name, tuple(attr for attr in op.attrs if not str(attr).startswith("layout")) or ("layout:ct",)
        inputs: tuple[Ref, ...] = (given, held)
        if op.name == GROUPED:
            inputs, attrs = (given, held, *op.inputs[2:]), (*op.attrs, f"{APART}{self.form.tp}") if apart else op.attrs
        elif op.name == "aten.addmm.default":
            name = "aten.mm.default"
        if role in (COLUMNS, SUMMED) and self.form.weights.name != "bf16":
            name, inputs, attrs = self._narrow(name, inputs, attrs)
        flops = 2 * rows * inner * outer
        self.out.append(Op(name, inputs, (made,), op.module, op.phase, flops, allocates, op.frees, attrs))
        if role in (COLUMNS, WORDS):
            self.parts |= {self.ops[one].outputs[0].storage for one in some}
        if apart and role == SUMMED:
            self._exchange("foretell.reduce_scatter", made.storage, op)
        if tp > 1 and role in (SUMMED, WORDS):
            spec = TensorSpec((ROWS, outer * tp) if role == WORDS else (TOKENS, outer), dtype)
            kind = "foretell.all_gather" if role == WORDS else "foretell.all_reduce"
            ref = Ref(made.storage, spec)
            self.out.append(Op(kind, (ref,), (ref,), op.module, op.phase, 0, attrs=("axis:tp", f"ranks:{tp}")))

    def _exchange(self, kind: str, storage: int, op: Op) -> None:
        """Tokens of all ranks, as wide as the model: gathered in the format of products, summed in 16 bits."""
        narrow = {"8-bit": 2, "4-bit": 4}.get(self.form.weights.kernel, 1) if kind.endswith("gather") else 1
        ref = Ref(storage, TensorSpec((TOKENS, self.hidden * self.form.tp // narrow), "bfloat16"))
        self.out.append(Op(kind, (ref,), (ref,), op.module, op.phase, 0, attrs=("axis:tp", f"ranks:{self.form.tp}")))

    def _columns(self, number: int) -> int:
        """Of a product's weight, that a rank has."""
        op = self.ops[number]
        weight = self._weight(op)
        assert weight is not None
        size = weight.spec.shape[-1]
        if self.roles[number] not in (COLUMNS, WORDS):
            return size
        return self._share(size, min(size, self._head_of(op)))

    def _head_of(self, op: Op) -> int:
        """Elements of one head of keys, where attention of the same module reads this."""
        for other in self.ops:
            if other.name == ATTEND and op.module.startswith(f"{other.module}."):
                return other.inputs[1].spec.shape[-1]
        return 1

    def _hold(self, number: int, role: str) -> None:
        weight = self._weight(self.ops[number])
        assert weight is not None
        one = self.storages[weight.storage]
        share = 1.0 if role == WHOLE else 1 / self.tp if role == SUMMED else self._columns(number) / weight.spec.shape[-1]
        if self.form.apart and self.ops[number].name == GROUPED:
            share /= self.form.tp
        bits = self.form.weights.bits if role in (COLUMNS, SUMMED) else 16.0
        self.storages[weight.storage] = one._replace(nbytes=int(self.trace.storages[weight.storage].nbytes * share * bits / 16))

    def _narrow(self, name: str, inputs: tuple[Ref, ...], attrs: tuple[int | float | str | bool, ...]) -> tuple[
        str, tuple[Ref, ...], tuple[int | float | str | bool, ...]
    ]:  # fmt: skip
        """A product with weights of another format; what tables do not have is priced from one that they have (price.serving)."""
        how = self.form.weights
        if how.kernel in ("8-bit", "4-bit") and name != GROUPED:
            eight = [Ref(ref.storage, TensorSpec(ref.spec.shape, "float8_e4m3fn")) for ref in inputs[:2]]
            return EIGHT, (*eight, *inputs[2:]), (*attrs, f"weights:{how.name}") if how.kernel == "4-bit" else attrs
        return name, inputs, (*attrs, f"weights:{how.name}")

    def _flush(self, until: int) -> None:
        """The small ops since the last product, as one kernel."""
        some, self.between = self.between, []
        real = [(number, op) for number, op in some if op.name.split(".")[1] not in VIEWS]
        allocates = [storage for _, op in some for storage in op.allocates]
        frees = [storage for _, op in some for storage in op.frees]
        inside = set(allocates) & set(frees)
        kept = (tuple(one for one in allocates if one not in inside), tuple(one for one in frees if one not in inside))
        gives = self._given(real, until)
        if gives:
            reads = self._read(real)
            module, phase = real[-1][1].module, real[-1][1].phase
            given = _evenly(reads or gives[:1], 2)
            given = tuple(Ref(gives[0].storage if ref.storage in self.weights else ref.storage, ref.spec) for ref in given)
            self.out.append(Op(FUSED, given, _evenly(gives, 1), module, phase, 0, *kept))
        elif some:
            self.out.append(Op("foretell.link", (), (), some[-1][1].module, some[-1][1].phase, 0, *kept))

    def _given(self, some: Sequence[tuple[int, Op]], until: int) -> tuple[Ref, ...]:
        """What is written and read later."""
        specs: dict[int, TensorSpec] = {}
        for _, op in some:
            whole = self.tp == 1 or not any(ref.storage in self.parts for ref in op.inputs)
            for ref in op.outputs:
                if not whole:
                    self.parts.add(ref.storage)
                specs[ref.storage] = ref.spec
        later = {storage for storage in specs if any(number >= until for number in self.readers[storage])}
        return tuple(Ref(storage, self._flat(storage, spec)) for storage, spec in specs.items() if storage in later)

    def _read(self, some: Sequence[tuple[int, Op]]) -> tuple[Ref, ...]:
        """What comes from outside; of a table that is looked up in, as much as is found there."""
        written: set[int] = set()
        specs: dict[int, TensorSpec] = {}
        for _, op in some:
            for place, ref in enumerate(op.inputs):
                looked = op.name in GATHERS and place == 0
                spec = TensorSpec(op.outputs[0].spec.shape, ref.spec.dtype) if looked else ref.spec
                held = op.outputs[0].storage if looked and ref.storage in self.weights else ref.storage
                if ref.storage not in written and spec.numel > specs.get(held, TensorSpec((0,), "bool")).numel:
                    specs[held] = spec
            written |= {ref.storage for ref in op.outputs}
        return tuple(Ref(storage, self._flat(storage, spec)) for storage, spec in specs.items() if spec.numel > 1)

    def _flat(self, storage: int, spec: TensorSpec) -> TensorSpec:
        """Rows by what a rank has of each."""
        for odd in (TOKENS, ROWS):
            if spec.numel % odd == 0:
                each = spec.numel // odd
                return TensorSpec((odd, self._share(each) if storage in self.parts else each), spec.dtype)
        return spec


def _evenly(refs: Sequence[Ref], parts: int) -> tuple[Ref, ...]:
    """As many bytes in so many tensors of one kind: what a kernel moves, whatever of."""
    each: dict[int, int] = defaultdict(int)
    for ref in refs:
        odd = next((one for one in (TOKENS, ROWS) if ref.spec.shape and ref.spec.shape[0] == one), 1)
        each[odd] += ref.spec.nbytes // odd
    odd = max(each, key=lambda one: one * each[one])
    spec = TensorSpec((odd, max(1, each[odd] // (2 * parts))), "bfloat16")
    return tuple(Ref(ref.storage, spec) for ref in (*refs, refs[0])[:parts])


def weights_bytes(trace: Trace) -> int:
    """Of a rank, as `engine_trace` left them."""
    return sum(one.nbytes for number in trace.resident if (one := trace.storages[number]).role == PARAMETER)


