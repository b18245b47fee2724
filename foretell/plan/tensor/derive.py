"""Derive how to split a model over the tensor axis from the calls of its forward. Pure: no torch.

Two choices start everything: a layer that is fed whole activations may split its outputs (column), and a lookup table
its rows (vocab). All the rest follows from the rules for calls: what meets a split dimension is split alike, and a layer
fed along it splits its inputs (row) and gives partial sums. Where a call cannot run on parts, the choices that led
there are undone, and the report says why. Numbers of repeated blocks are written `*`: all blocks are split alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from foretell.errors import UserError
from foretell.plan import paths
from foretell.plan.tensor.flow import Again, Choices, Leg, Pass, WritesOver
from foretell.plan.tensor.types import Setting, Shard
from foretell.plan.tensor.weights import Use, collapsed, parameter_keys, parameter_sizes, weight_uses
from foretell.trace.flow.calls import Flow

STYLES = {
    "colwise": "column", "colwise_rep": "column", "colwise_gather_output": "column", "rowwise": "row",
    "rowwise_rep": "row", "packed_colwise": "column:2", "vocab_parallel_rowwise": "vocab",
    "embedding_rowwise": "vocab",
}  # fmt: skip
"""Styles of a Hugging Face plan → rules."""
WORTH = 0.5
"""Share of the layers' weights below which splitting is refused: most of the model would be computed on every rank."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One exchange between the ranks of the tensor axis."""

    kind: str
    """all-reduce, all-gather or reduce-scatter."""
    phase: str
    """forward or backward."""
    nbytes: int
    """Of the whole tensor."""
    module: str


@dataclass(frozen=True, kw_only=True)
class Derived:
    """How to split a model, and what stays whole."""

    setting: Setting
    rules: Mapping[str, str]
    """As a plan file has them."""
    places: Mapping[str, Shard]
    """Parameter, numbers as `*` → how it is split."""
    whole: Mapping[str, str]
    """Parameter that could not be split, numbers as `*` → why."""
    share: float
    """Of the elements of all matrices, how many are split."""
    layers: float
    """The same without lookup tables."""
    sequence: tuple[str, ...]
    """What activations between split regions are split along: positions, samples; empty where they are whole."""
    loss: bool
    """Whether the loss is computed on split logits."""
    collectives: tuple[Exchange, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def ranks(self) -> int:
        return self.setting.ranks

    def place(self, name: str) -> Shard | None:
        """How the parameter of this name is split."""
        ways = (collapsed(name, keep) for keep in range(name.count(".") + 2))
        return next((self.places[key] for key in ways if key in self.places), None)

    def report(self) -> tuple[str, ...]:
        """What was done, for people, one line each."""
        lines = [f"split over {self.ranks} ranks: {self.share:.1%} of the weights"]
        for kind in ("column", "row", "vocab", "split"):
            paths = [path if ":" not in rule else f"{path} ({rule.split(':', 1)[1]})" for path, rule in self.rules.items()
                     if rule.split(":")[0] == kind]  # fmt: skip
            if paths:
                lines.append(f"{kind}: {', '.join(paths)}")
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.whole.items():
            if path.endswith(".bias") and self.whole.get(path.removesuffix("bias") + "weight") == reason:
                continue
            by_reason.setdefault(reason, []).append(path.removesuffix(".weight"))
        lines += [f"whole: {', '.join(paths)}: {reason}" for reason, paths in by_reason.items()]
        lines.append(
            "activations between split regions: "
            + (f"split along {' and '.join(self.sequence)}" if self.sequence else "whole")
        )
        lines.append("loss: " + ("on split logits" if self.loss else "on whole logits"))
        return (*lines, *self.notes)


def derive(
    flow: Flow, ranks: int, *, sequence: bool = True, loss: bool = True, rules: Mapping[str, str] | None = None,
    own: Mapping[str, str] | None = None,
) -> Derived:  # fmt: skip
    """Split rules for a flow.

    `rules` are taken as they are and checked: what they say that would be wrong is a `UserError`. `own` is the model's
    own plan in Hugging Face's words: it is followed where it can be proven, and otherwise noted and left.
    """
    setting = Setting(ranks, sequence, loss)
    notes: list[str] = []
    try:
        if rules:
            leg, choices = _checked(flow, setting, rules)
        else:
            leg, choices = _own(flow, setting, own or {}, notes) or _free(flow, setting, Choices())
    except WritesOver as trouble:
        if not sequence:
            raise UserError(
                f"this model cannot be split: {trouble}",
                "use tp 1, or write that part without changing tensors in place",
            ) from None
        found = derive(flow, ranks, sequence=False, loss=loss, rules=rules, own=own)
        return replace(found, notes=(*found.notes, f"activations between split regions stay whole: {trouble}"))
    return _derived(flow, setting, leg, choices, notes)


def refusal(derived: Derived) -> UserError | None:
    """Why such a split is not worth running; None where it is."""
    if derived.layers >= WORTH:
        return None
    reasons = list(dict.fromkeys(derived.whole.values()))
    found = f"only {derived.layers:.0%} of its layers" if derived.layers else "none of its layers"
    told = f": {'; '.join(reasons[:3])}" if reasons else ": none of them is a linear layer"
    return UserError(
        f"{found} can be split over tp {derived.ranks}{told}",
        "use tp 1 and other axes of the mesh, or a tp that divides them",
    )


# ---------------------------------------------------------------- choices


def _free(flow: Flow, setting: Setting, choices: Choices) -> tuple[Leg, Choices]:
    """Follow the flow, undoing what turns out to be impossible, until it goes through."""
    for _ in range(100 + len(parameter_sizes(flow)) ** 2):
        try:
            return Pass(flow, setting, choices).run(), choices
        except Again:
            continue
    raise UserError("no consistent way to split this model was found", "give the rules of the plan's split by hand")


def _own(flow: Flow, setting: Setting, own: Mapping[str, str], notes: list[str]) -> tuple[Leg, Choices] | None:
    starts: dict[str, tuple[str, Shard]] = {}
    for path, style in own.items():
        try:
            starts.update(_starts(flow, setting, {path: STYLES[style]}) if style in STYLES else {})
        except UserError:  # it names what this model does not have, or does not use as a layer
            continue
    if not starts:
        return None
    uses, sizes = weight_uses(flow), parameter_sizes(flow)
    tables = {key for key, use in uses.items() if use.table}
    chosen = {key: place for key, (rule, place) in starts.items() if rule.startswith("column") and key not in tables}
    leg, choices = _free(flow, setting, Choices(starts=chosen))
    if any(key not in choices.places() for key in starts):
        # A plan that is wrong somewhere may stand in the way elsewhere: what splits more counts.
        free = _free(flow, setting, Choices())
        leg, choices = max((leg, choices), free, key=lambda pair: sum(_elements(sizes[k]) for k in pair[1].places()))
    before = len(notes)
    for key, (rule, place) in starts.items():
        found = choices.places().get(key)
        if found is None or (found.dim != place.dim and key not in tables):
            now = (
                _rule(key, found, sizes[key], uses.get(key))
                if found
                else choices.banned.get(key, "its input is not split")
            )
            notes.append(
                f"the model's own plan has {key.removesuffix('.weight')} as {rule}, which is not followed: {now}"
            )
    if len(notes) == before:
        notes.append("agrees with the model's own plan")
    return leg, choices


def _checked(flow: Flow, setting: Setting, rules: Mapping[str, str]) -> tuple[Leg, Choices]:
    """Follow the flow with these rules and no other."""
    starts = _starts(flow, setting, rules)
    fixed = {key: place for key, (rule, place) in starts.items() if not rule.startswith("row")}
    rows = frozenset(key for key, (rule, _) in starts.items() if rule.startswith("row"))
    choices = Choices(starts=dict(fixed), rows=rows, fixed=True)
    leg, choices = _free(flow, setting, choices)
    for key, (rule, _) in starts.items():
        if key not in choices.places():
            reason = choices.banned.get(key, "its input is not split")
            raise UserError(
                f"the rule {key.removesuffix('.weight')}: {rule} cannot hold: {reason}",
                "leave it out, or leave all rules out to have them derived",
            )
    return leg, choices


def _starts(flow: Flow, setting: Setting, rules: Mapping[str, str]) -> dict[str, tuple[str, Shard]]:
    """Parameter → rule and place, for rules that are written down."""
    sizes, uses = parameter_sizes(flow), weight_uses(flow)
    found: dict[str, tuple[str, Shard]] = {}
    for path, rule in rules.items():
        keys = _named(flow, f"{path}.weight") or _named(flow, path)
        if not keys:
            near = [name for name in sizes if name.rpartition(".")[0].endswith(path.rpartition(".")[2])][:3]
            raise UserError(
                f"the rule for {path} names no layer or parameter of the model",
                f"near: {', '.join(near)}" if near else "see the report of a derived split",
            )
        for key in keys:
            place = _parsed(path, rule, sizes[key], uses.get(key))
            if any(segment % setting.ranks for segment in place.segments):
                raise UserError(
                    f"the rule {path}: {rule} splits {'+'.join(map(str, place.segments))}, which does not divide by {setting.ranks}",
                    "use a tp that divides it",
                )
            if key in found and found[key] != (rule, place):
                raise UserError(f"two rules for {path} differ", "write one, with * for the number of the block")
            found[key] = (rule, place)
    return found


def _named(flow: Flow, pattern: str) -> list[str]:
    """Parameters that a pattern stands for, by what they go by."""
    keys = parameter_keys(flow)
    found = [keys[value] for value, names in flow.parameters.items() if any(paths.matches(pattern, n) for n in names)]
    return list(dict.fromkeys(found))


def _parsed(path: str, rule: str, shape: tuple[int, ...], use: Use | None) -> Shard:
    kind, _, rest = rule.partition(":")
    if kind == "split":
        text, _, rest = rest.partition(":")
        dim = int(text) if re.fullmatch(r"\d+", text) and int(text) < len(shape) else -1
    elif kind in ("column", "row") and use is not None:
        dim = use.out if kind == "column" else use.into
    else:
        dim = 0 if kind == "vocab" else -1
    if dim < 0:
        raise UserError(f"'{rule}' is no rule for {path}", "use column, row, column:N, vocab or split:DIM")
    if re.fullmatch(r"\d+", rest) and int(rest) and shape[dim] % int(rest) == 0:
        return Shard(dim, (shape[dim] // int(rest),) * int(rest))
    if re.fullmatch(r"\d+(\+\d+)+", rest) and sum(map(int, rest.split("+"))) == shape[dim]:
        return Shard(dim, tuple(map(int, rest.split("+"))))
    if rest:
        raise UserError(
            f"'{rule}' does not say how the {shape[dim]} of {path} are divided",
            f"write a number of equal parts, or sizes that add up to {shape[dim]} such as {shape[dim] // 2}+{shape[dim] - shape[dim] // 2}",
        )
    return Shard(dim, (shape[dim],))


# ---------------------------------------------------------------- what came out


def _derived(flow: Flow, setting: Setting, leg: Leg, choices: Choices, notes: list[str]) -> Derived:
    sizes, uses = parameter_sizes(flow), weight_uses(flow)
    places = choices.places()
    matrices = {key for key, shape in sizes.items() if len(shape) >= 2}
    layers = {key for key in matrices if key not in uses or not uses[key].table}
    rules = {}
    for key, place in places.items():
        text = _rule(key, place, sizes[key], uses.get(key))
        path, _, last = key.rpartition(".")
        if last == "weight" and key in uses:
            rules[path] = text
        elif not (len(sizes[key]) == 1 and f"{path}.weight" in places):
            rules[key] = text
    return Derived(
        setting=setting, rules=rules, places=places, notes=tuple(notes),
        share=_part(flow, matrices, places), layers=_part(flow, layers, places),
        whole={key: reason for key, reason in choices.banned.items() if key not in places},
        sequence=tuple(dict.fromkeys("positions" if dim else "samples" for dim in sorted(leg.stream, reverse=True))),
        loss=leg.loss,
        collectives=tuple(Exchange(kind=k, phase=p, nbytes=n, module=m) for k, p, n, m in leg.exchanges),
    )  # fmt: skip


def _part(flow: Flow, keys: set[str], places: Mapping[str, Shard]) -> float:
    """Of the elements of these parameters, how many are split."""
    sizes = [(key, _elements(flow.values[value].shape)) for value, key in parameter_keys(flow).items() if key in keys]
    total = sum(size for _, size in sizes)
    return sum(size for key, size in sizes if key in places) / total if total else 0.0


def _elements(shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _rule(key: str, place: Shard, shape: tuple[int, ...], use: Use | None) -> str:
    if use is None:
        kind = f"split:{place.dim}"
    elif place.dim == use.into:
        kind = "vocab" if use.table else "row"
    else:
        kind = "column" if place.dim == use.out else f"split:{place.dim}"
    segments = place.segments
    if len(segments) == 1:
        return kind
    return f"{kind}:{len(segments) if len(set(segments)) == 1 else '+'.join(map(str, segments))}"
