"""A small made-up cost of layouts for tests of the search: few rules, so that everything can be tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from foretell.search.estimate.plan import Layout, Quick
from foretell.search.space.residency import KEPT, RecomputeOption
from foretell.search.space.stages import BlockStack, in_flight, rank_of

AGAIN = {"keep": (0.0, 0.0), "selective": (0.4, 0.08), "recompute": (0.85, 0.33)}
"""Mode → share of a block's bytes that it saves, share of its seconds that it costs."""


@dataclass(frozen=True)
class Made:
    """Blocks with seconds, bytes held and bytes of state; axes cost what simple rules say."""

    seconds: tuple[float, ...]
    held: tuple[float, ...]
    state: tuple[float, ...]
    capacity: float = 100.0
    tensor_talk: float = 0.05
    data_talk: float = 0.02
    beside: float = 3.0
    joules_per_second: float = 500.0

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(f"blocks.{number}" for number in range(len(self.seconds)))

    def _scale(self, layout: Layout) -> tuple[float, float, float]:
        mesh = layout.mesh
        talk = self.tensor_talk * (mesh.tp - 1) * layout.micro_batch
        return layout.micro_batch / mesh.tp + talk, layout.micro_batch / mesh.tp, 1 / (mesh.tp * mesh.dp_shard)

    def stack(self, layout: Layout, treated: bool = False) -> BlockStack:
        time, held, state = self._scale(layout)
        return BlockStack(
            seconds=tuple(s * time for s in self.seconds), held=tuple(h * held for h in self.held),
            state=tuple(s * state for s in self.state), before=(0.0, 0.0, 0.0), after=(0.3 * time, 0.5 * held, 2 * state),
            ways=tuple(
                (KEPT, *(RecomputeOption(h * held * saves, s * time * more, mode)
                         for mode, (saves, more) in AGAIN.items() if saves))
                for s, h in zip(self.seconds, self.held, strict=True)
            ),
        )  # fmt: skip

    def rough(self, layout: Layout) -> float:
        return self.ideal(layout)

    def optimist(self) -> Made:
        return self

    def ideal(self, layout: Layout) -> float:
        stack = self.stack(layout)
        return (sum(stack.seconds) + stack.after[0]) / layout.mesh.pp * layout.accumulate

    def limit(self, layout: Layout) -> float:
        return self.capacity

    def quick(self, layout: Layout) -> Quick:
        ranks = layout.mesh.pp
        busy, memory = [0.0] * ranks, [self.beside] * ranks
        for _, rank, flight, seconds, held, state in self._stages(layout):
            busy[rank] += seconds
            memory[rank] += state + held * flight
        talk = self.data_talk * (layout.mesh.data - 1) * (0.6 if layout.reshard is False else 1.0)
        whole = max(busy) * (layout.accumulate + (ranks - 1) / layout.interleave) + talk
        most = max(memory)
        return Quick(
            seconds=whole, low=0.9 * whole, high=1.1 * whole, memory_bytes=most,  # type: ignore[arg-type]
            margin_bytes=self.capacity - most, best_margin_bytes=self.capacity - most,  # type: ignore[arg-type]
            stage_memory=tuple(memory), stage_seconds=tuple(busy), joules=whole * layout.mesh.world * self.joules_per_second,  # type: ignore[arg-type]
            parts={"compute": max(busy) * layout.accumulate, "dp_shard communication": talk,
                   "bubble": whole - talk - max(busy) * layout.accumulate},
        )  # fmt: skip

    def _stages(self, layout: Layout) -> Sequence[tuple[int, int, int, float, float, float]]:
        stack, ranks = self.stack(layout), layout.mesh.pp
        schedule = layout.schedule or "1f1b"
        flights = in_flight(schedule, ranks, layout.interleave, layout.accumulate) if ranks > 1 else (1,)
        modes = layout.modes or ("keep",) * len(self.seconds)
        found = []
        edges = list(pairwise([0, *layout.cuts, len(self.seconds)]))
        for stage, (start, end) in enumerate(edges):
            seconds, held, state = stack.after if stage == len(edges) - 1 else (0.0, 0.0, 0.0)
            for block in range(start, end):
                saves, more = AGAIN[modes[block]]
                seconds += stack.seconds[block] * (1 + more)
                held += stack.held[block] * (1 - saves)
                state += stack.state[block] * (1.2 if layout.reshard is False else 1.0)
            rank = rank_of(schedule, ranks, stage) if ranks > 1 else 0
            found.append((stage, rank, flights[stage], seconds, held, state))
        return found
