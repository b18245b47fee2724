"""What is asked of a search, and what every way to search answers it with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from foretell.hardware.types import Cluster
from foretell.plan.facts import Facts, with_hardware
from foretell.plan.recipe import model_of
from foretell.search.solve import planned_batch as law
from foretell.search.space import constraints as space_wishes
from foretell.search.space.constraints import SearchConstraints
from foretell.search.traces.needed import Traces
from foretell.simulate.plan import Options
from foretell.trace.load.model import Source
from foretell.trace.sandbox.process import TIME_LIMIT

K = TypeVar("K")
Progress = Callable[[str], None]


@dataclass
class Question:
    """A model, where it is to run, and what is wished for."""

    source: Source
    cluster: Cluster
    hardware: str
    """As the user wrote it."""
    wishes: SearchConstraints
    options: Options
    traces: Traces
    progress: Progress
    by_law: bool = field(default=False, kw_only=True)
    """Whether, where no batch is asked for, the Step Law's is taken."""

    def into(self, kind: Callable[..., K], **more: Any) -> K:
        """The question with what one way to search it needs besides."""
        return kind(**{one.name: getattr(self, one.name) for one in fields(Question)}, **more)

    @property
    def on_cpu(self) -> bool:
        return self.cluster.device.backend == "cpu"

    def about(self, blocks: Sequence[str]) -> Mapping[str, Any]:
        """The model as plans name it."""
        return model_of(self.source, blocks=tuple(blocks), shapes=self.traces.facts.shapes or None)

    def facts(self, blocks: Sequence[str]) -> Facts:
        """What says whether a plan is legal; processes of a CPU share its cores."""
        facts = with_hardware(Facts(blocks=tuple(blocks), tied=self.traces.facts.tied), self.cluster)
        if self.on_cpu:
            facts = replace(facts, devices=max(2, self.cluster.device.sm_count), devices_per_node=None)
        return replace(facts, global_batch=self.wishes.global_batch)

    def law(self, blocks: Sequence[str], length: int | None) -> law.BatchAdvice | None:
        """What the Step Law says of the run, where its tokens are known; its batch becomes a wish where that was asked for."""
        wishes = self.wishes
        if wishes.tokens is None:
            return None
        found = law.advice(
            self.traces.facts.shapes, blocks, wishes.tokens, length, devices=self.cluster.count, fixed=wishes.fixed,
            micro_batch=wishes.micro_batch, global_batch=wishes.global_batch, followed=self.by_law,
        )  # fmt: skip
        if found is not None and found.followed:
            self.wishes = replace(wishes, global_batch=found.chosen)
        return found


def ask(
    source: Source, cluster: Cluster, hardware: str, wishes: SearchConstraints | None = None, *, options: Options | None = None,
    hints: Mapping[str, float] | None = None, cache: bool = True, progress: Progress = lambda _: None,
    traces: Traces | None = None, by_law: bool = False, time_limit: float = TIME_LIMIT,
) -> Question:  # fmt: skip
    """A question whose wishes can be kept; `traces`: those at hand; `time_limit`: seconds that tracing one step may take."""
    asked, how = wishes or SearchConstraints(), options or Options()
    space_wishes.check(asked, cluster)
    law.check(by_law, asked.tokens)
    capability = None if cluster.device.backend == "cpu" else cluster.device.compute_capability or (9, 0)
    known = traces or Traces(capability=capability, hints=dict(hints or {}), cache=cache, progress=progress, time_limit=time_limit)
    how = replace(how, profile_of=functools.cache(how.profile_of))
    return Question(source, cluster, hardware, asked, how, known, progress, by_law=by_law)
