"""The traces that plans of one model are costed from: asked for as they are needed, kept on disk, traced together.

Micro-batches above 4 are derived from those of 2 and 4 samples; residencies and precisions are traced each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.lower.batch import BatchMismatch, rebatch
from foretell.plan.recipe import recipe_of, source_of
from foretell.plan.types import Plan
from foretell.search.traces.shares import Shares
from foretell.trace.load.model import is_script
from foretell.trace.sandbox.child import request
from foretell.trace.sandbox.process import TIME_LIMIT, Progress
from foretell.trace.store import cache as store
from foretell.trace.store import traces as stored
from foretell.trace.types import Trace

PAIR = (2, 4)
"""Micro-batches that larger ones are derived from."""
NO_SCRIPT = "ranks of a script share batches and parameters only"


@dataclass(frozen=True)
class ModelFacts:
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
    time_limit: float = TIME_LIMIT
    """Seconds that tracing one step may take."""
    own: Mapping[str, stored.Stored] = field(default_factory=dict)
    """Traces that a run folder has, by their request (`question`): they come first."""
    notes: list[str] = field(default_factory=list)
    _known: dict[str, Trace] = field(default_factory=dict)
    _crooked: set[str] = field(default_factory=set)
    """Questions whose larger micro-batches cannot be derived."""
    files: dict[str, str] = field(default_factory=dict)
    """User file that some trace depends on → its hash."""
    facts: ModelFacts = ModelFacts({}, ())
    """Of the model's parameters, once something of it was traced."""

    def of(self, plan: Plan, modes: Iterable[str]) -> dict[str, Trace]:
        """Traces of one rank's step at the plan's micro-batch, one for each residency asked for."""
        wanted = list(modes)
        self.prepare([(plan, mode) for mode in wanted])
        return {mode: self._one(plan, mode) for mode in wanted}

    def prepare(self, plans: Iterable[tuple[Plan, str]]) -> None:
        """Trace what these plans and residencies need, side by side."""
        wanted: dict[str, dict[str, Any]] = {}
        for plan, mode in plans:
            for asked in self._needed(plan, mode):
                wanted.setdefault(store.key_of({"trace": asked}), asked)
        missing = [asked for asked in wanted.values() if not self._at_hand(asked)]
        if not missing:
            return
        for asked, (text, reply) in zip(missing, self._made(missing), strict=True):
            if self._keeps(asked):
                stored.keep(asked, text, reply)
            self._take(asked, stored.parsed({"trace": text, **reply}))

    def _made(self, requests: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        """New traces, all made in a process of their own; those of a script each by following it."""
        if is_script(requests[0]["source"]["model"]):
            from foretell.search.traces.scripted import follow_all

            return follow_all(requests, self.progress, cache=self.cache, time_limit=self.time_limit)
        from foretell.search.traces.child import trace_all

        return trace_all(requests, self.progress, time_limit=self.time_limit)

    def shares(self, plan: Plan) -> Shares:
        """What ranks can share of a plan's model: positions, experts."""
        if is_script(str(plan.model["model"])):
            return Shares(no_positions=NO_SCRIPT, no_experts=NO_SCRIPT)
        source = replace(source_of(plan), micro_batch=PAIR[0])
        asked = {"source": {**vars(source), "overrides": dict(source.overrides)}, "shares": True}
        key = store.key_of({"shares": asked})
        found = store.read("shares", key, lambda entry: Shares.from_json(entry["shares"])) if self.cache else None
        if found is not None:
            return found
        from foretell.search.traces.child import trace_all

        (text, reply), *_ = trace_all([asked], self.progress, time_limit=self.time_limit)
        if self.cache:
            store.write("shares", key, {"shares": json.loads(text)}, reply["files"])
        return Shares.from_json(json.loads(text))

    # ------------------------------------------------------------------ one trace

    def _one(self, plan: Plan, mode: str) -> Trace:
        question = self._key(plan, mode, 0)
        if plan.micro_batch > PAIR[1] and question not in self._crooked:
            self.prepare([(plan, mode)])
            small, large = (self._known[self._key(plan, mode, size)] for size in PAIR)
            try:
                return rebatch(small, large, PAIR, plan.micro_batch)
            except BatchMismatch:
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
        asked = request(source, recipe, self.capability or (), self.hints)
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
        return all(self._at_hand(asked) for asked in self._needed(plan, mode))

    def kept(self, plan: Plan, modes: Iterable[str]) -> dict[str, stored.TraceEntry]:
        """What is stored of what a plan needs: by its request, as text. Nothing is traced."""
        requests = [asked for mode in modes for asked in self._needed(plan, mode)]
        found = {question(asked): self._stored(asked) for asked in requests}
        return {name: one[1] for name, one in found.items() if one is not None}

    def _at_hand(self, asked: Mapping[str, Any]) -> bool:
        if store.key_of({"trace": asked}) in self._known:
            return True
        found = self._stored(asked)
        if found is not None:
            self._take(asked, found)
        return found is not None

    def _stored(self, asked: Mapping[str, Any]) -> stored.Stored | None:
        return self.own.get(question(asked)) or (stored.known(asked) if self._keeps(asked) else None)

    def _keeps(self, asked: Mapping[str, Any]) -> bool:
        """What is followed depends on more than a request says, and is kept by `trace.script.kept`."""
        return self.cache and not is_script(asked["source"]["model"])

    def _take(self, asked: Mapping[str, Any], found: stored.Stored) -> None:
        trace, entry = found
        self._known[store.key_of({"trace": asked})] = trace
        self.files.update(entry.files)
        self.notes.extend(note for note in entry.notes if note not in self.notes)
        if entry.shapes is not None:
            self.facts = ModelFacts(entry.shapes, entry.tied)


def question(asked: Mapping[str, Any]) -> str:
    """A request as one text, without the folder it was asked in: a run's traces are its own, wherever it is read."""
    return json.dumps({name: value for name, value in asked.items() if name != "folder"}, sort_keys=True, default=str)
