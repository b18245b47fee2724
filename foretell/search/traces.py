"""The traces that plans of one model are costed from: asked for as they are needed, kept on disk, traced together.

Micro-batches above 4 are derived from those of 2 and 4 samples; residencies and precisions are traced each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.cost.plan_batch import Unlike, rebatch
from foretell.plan.recipe import recipe_of, source_of
from foretell.plan.types import Plan
from foretell.search.shares import Shares
from foretell.trace import cache as store
from foretell.trace.child import request
from foretell.trace.file import loads
from foretell.trace.types import Trace

PAIR = (2, 4)
"""Micro-batches that larger ones are derived from."""
MODES = ("keep", "recompute", "selective")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """What building the model says of it."""

    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    tied: tuple[tuple[str, ...], ...]


@dataclass
class Traces:
    """All traces of one model for one kind of device."""

    capability: tuple[int, int] | None
    """None: as this machine's CPU runs it."""
    hints: Mapping[str, float] = field(default_factory=dict)
    cache: bool = True
    progress: Progress = lambda _: None
    notes: list[str] = field(default_factory=list)
    _known: dict[str, Trace] = field(default_factory=dict)
    _crooked: set[str] = field(default_factory=set)
    """Questions whose larger micro-batches cannot be derived."""
    facts: Facts = Facts({}, ())
    """Of the model's parameters, once something of it was traced."""

    def of(self, plan: Plan, modes: Iterable[str]) -> dict[str, Trace]:
        """Traces of one rank's step at the plan's micro-batch, one for each residency asked for."""
        return {mode: self._one(plan, mode) for mode in modes}

    def prepare(self, plans: Iterable[tuple[Plan, str]]) -> None:
        """Trace what these plans and residencies need, all in one process."""
        wanted: dict[str, dict[str, Any]] = {}
        for plan, mode in plans:
            for asked in self._needed(plan, mode):
                wanted.setdefault(store.key_of({"trace": asked}), asked)
        missing = {key: asked for key, asked in wanted.items() if not self._at_hand(key)}
        if not missing:
            return
        for (key, _), (text, reply) in zip(missing.items(), self._made(list(missing.values())), strict=True):
            self._keep(key, text, reply)

    def _made(self, requests: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        """New traces, all made in a process of their own."""
        from foretell.search.child import trace_all

        return trace_all(requests, self.progress)

    def shares(self, plan: Plan) -> Shares:
        """What ranks can share of a plan's model: positions, experts."""
        source = replace(source_of(plan), micro_batch=PAIR[0])
        asked = {"source": {**vars(source), "overrides": dict(source.overrides)}, "shares": True}
        key = store.key_of({"shares": asked})
        found = store.read("shares", key) if self.cache else None
        if found is None:
            from foretell.search.child import trace_all

            (text, reply), *_ = trace_all([asked], self.progress)
            found = {"shares": json.loads(text)}
            if self.cache:
                store.write("shares", key, found, reply["files"])
        return Shares.from_json(found["shares"])

    # ------------------------------------------------------------------ one trace

    def _one(self, plan: Plan, mode: str) -> Trace:
        question = self._key(plan, mode, 0)
        if plan.micro_batch > PAIR[1] and question not in self._crooked:
            self.prepare([(plan, mode)])
            small, large = (self._known[self._key(plan, mode, size)] for size in PAIR)
            try:
                return rebatch(small, large, PAIR, plan.micro_batch)
            except Unlike:
                self._crooked.add(question)
        self.prepare([(plan, mode)])
        return self._known[self._key(plan, mode, plan.micro_batch)]

    def _needed(self, plan: Plan, mode: str) -> list[dict[str, Any]]:
        if plan.micro_batch > PAIR[1] and self._key(plan, mode, 0) not in self._crooked:
            return [self._asked(plan, mode, size) for size in PAIR]
        return [self._asked(plan, mode, plan.micro_batch)]

    def _asked(self, plan: Plan, mode: str, micro_batch: int) -> dict[str, Any]:
        """One request: nothing in it that a trace does not depend on."""
        recipe = replace(recipe_of(plan, mode), accumulate=1, compile="none", shards=1)
        source = replace(source_of(plan), micro_batch=micro_batch)
        asked = request(source, recipe, self.capability or (), self.hints)  # type: ignore[arg-type]
        if plan.mesh.tp > 1:
            split = plan.split
            asked["tp"] = {
                "ranks": plan.mesh.tp, "sequence": split.sequence if split else True, "loss": split.loss if split else True,
                "rules": dict(split.rules) if split else {},
            }  # fmt: skip
        asked |= {axis: getattr(plan.mesh, axis) for axis in ("cp", "ep") if getattr(plan.mesh, axis) > 1}
        if plan.mesh.tp * plan.mesh.cp * plan.mesh.ep == 1:
            asked["facts"] = True
        return asked

    def _key(self, plan: Plan, mode: str, micro_batch: int) -> str:
        return store.key_of({"trace": self._asked(plan, mode, micro_batch)})

    # ------------------------------------------------------------------ on disk

    def at_hand(self, plan: Plan, mode: str) -> bool:
        """Whether nothing has to be traced for a plan's blocks in a mode."""
        return all(self._at_hand(store.key_of({"trace": asked})) for asked in self._needed(plan, mode))

    def _at_hand(self, key: str) -> bool:
        return key in self._known or self._stored(key)

    def _stored(self, key: str) -> bool:
        found = store.read("traces", key) if self.cache else None
        if found is None:
            return False
        self._take(key, found["trace"], found)
        return True

    def _keep(self, key: str, text: str, reply: Mapping[str, Any]) -> None:
        if self.cache:
            entry = {name: reply[name] for name in ("notes", "shapes", "tied", "source") if name in reply}
            store.write("traces", key, {"trace": text, **entry}, reply["files"])
        self._take(key, text, reply)

    def _take(self, key: str, text: str, entry: Mapping[str, Any]) -> None:
        self._known[key] = loads(text)
        self.notes.extend(note for note in entry.get("notes", ()) if note not in self.notes)
        if "shapes" in entry:
            shapes = {name: (tuple(shape), dtype) for name, (shape, dtype) in entry["shapes"].items()}
            self.facts = Facts(shapes, tuple(map(tuple, entry["tied"])))
