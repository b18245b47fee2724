"""Steps on a GPU whose bits depend on no neighbour: in parts of two fixed shapes, one CUDA graph for each.

    a step  │ generated tokens ─► parts of 128 rows: decode kernel │ tokens of prompts ─► parts of up to 512 rows: chunk kernel │

A generated token that is computed anew, since its pages were lost, is again a row of the first kind; several of one sequence go together:
keys and values of a part are written before attention reads them. Rows are sampled eight at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foretell.errors import ModelError, UserError
from foretell.serve.graphs import TURNS, CapturedStep, GraphRunner, StepLayout
from foretell.serve.runner import Launched
from foretell.serve.sampling import Sampling
from foretell.simulate.serving.invariant import SAMPLED, FixedSizes, fixed_sizes, step_parts
from foretell.simulate.serving.scheduler import Row, Step
from foretell.simulate.serving.scheduler import Sequence as Scheduled

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call how many there are."""

CHECKED = 16
"""Tokens at most of a sequence that is looked at when an engine starts."""


class FixedPart(NamedTuple):
    """What is computed at once."""

    generated: bool
    rows: tuple[Row, ...]
    """Of one token each where they are generated."""
    tokens: tuple[Sequence[int], ...]

    @property
    def samples(self) -> int:
        return sum(row.samples for row in self.rows)


def fixed_parts(step: Step, tokens: Sequence[Sequence[int]], sizes: FixedSizes) -> Iterator[FixedPart]:
    """The parts of a step; those that sample do so in the order of the step."""
    for generated, pieces in step_parts([(row.generated, row.count) for row in step], sizes):
        rows: list[Row] = []
        given: list[Sequence[int]] = []
        for number, first, count in pieces:
            sequence, start = step[number].sequence, step[number].start + first
            some = tokens[number][first : first + count]
            if generated:
                rows += [Row(sequence, start + at, 1) for at in range(count)]
                given += [(one,) for one in some]
            else:
                rows.append(Row(sequence, start, count))
                given.append(some)
        yield FixedPart(generated, tuple(rows), tuple(given))


def fixed_layouts(sizes: FixedSizes, wide: int, tall: int) -> dict[bool, StepLayout]:
    """Of both kinds (generated); `wide`: pages of a sequence, `tall`: queries of a tile."""
    many, prompted, most = sizes
    return {True: StepLayout(many, many, many, 0, wide), False: StepLayout(prompted, most, most, -(-prompted // tall) + most, wide)}


class FixedRunner(GraphRunner):
    """A model on a CUDA device."""

    group = SAMPLED

    def __init__(self, model: nn.Module, pages: int, size: int, *, running: int, tokens: int, check: bool = True, **more: Any) -> None:
        config = getattr(model, "config", None)
        if any((getattr(config, name, None) or 0) > 1 for name in EXPERTS):
            problem = f"{type(model).__name__} has experts, whose products have as many rows as tokens chose them"
            raise UserError(f"--invariant: {problem}", "leave --invariant out; on a CPU experts are served so")
        self.sizes = fixed_sizes(tokens)
        self._parts: dict[bool, CapturedStep] = {}
        self._part = 0
        """Computed so far."""
        self._part_events = [torch.cuda.Event() for _ in range(TURNS)]
        self._step_logits = self._best = torch.empty(0)
        super().__init__(model, pages, size, running=running, tokens=tokens, check=check, **more)
        if check:
            self._check_rows()

    def close(self) -> None:
        self._parts, self._step_logits = {}, torch.empty(0)
        super().close()

    @property
    def layouts(self) -> dict[bool, StepLayout]:
        return fixed_layouts(self.sizes, self.wide, self._tall)

    @property
    def _most_kept(self) -> int:
        return max(one.kept for one in self.layouts.values())

    def _most_numbers(self) -> int:
        return max(one.size for one in self.layouts.values())

    # ------------------------------------------------------------------ a step

    def launch(self, step: Step, tokens: Sequence[Sequence[int]], asked: Sequence[tuple[Sampling, int]]) -> Launched:
        turn = self._turn = (self._turn + 1) % TURNS
        self._events[turn].synchronize()  # its tokens were collected, TURNS steps ago
        self._compute(step, tokens)
        self._latest[: len(asked)].copy_(self._best[: len(asked)])
        return self._sampled(turn, self._step_logits[: len(asked)], asked, self._latest[: len(asked)])

    def logits(self, step: Step, tokens: Sequence[Sequence[int]]) -> Tensor:
        return self._step_logits[: self._compute(step, tokens)].clone()

    def _compute(self, step: Step, tokens: Sequence[Sequence[int]]) -> int:
        """All parts, one behind the other; how many rows have logits."""
        first = 0
        for part in fixed_parts(step, tokens, self.sizes):
            layout, turn = self.layouts[part.generated], self._part % TURNS
            self._part += 1
            self._part_events[turn].synchronize()  # the part that used this buffer
            layout.fill(self._pinned[turn].numpy(), part.rows, part.tokens, self.pool.size, self._tall, part.generated)
            self._given[: layout.size].copy_(self._pinned[turn][: layout.size], non_blocking=True)
            self._part_events[turn].record()
            logits, best = self._computed(layout, part.generated)
            if not self._step_logits.numel():
                rows = max(self.running, self.sizes.sequences)
                self._step_logits = torch.zeros(rows, logits.shape[1], dtype=logits.dtype, device=self.device)
                self._best = torch.zeros(rows, dtype=torch.int64, device=self.device)
            if part.samples:
                self._step_logits[first : first + part.samples].copy_(logits[: part.samples])
                self._best[first : first + part.samples].copy_(best[: part.samples])
            first += part.samples
        return first

    def _computed(self, layout: StepLayout, generated: bool) -> tuple[Tensor, Tensor]:
        if generated in self._parts:
            self._parts[generated].replay()
            return self._logits, self._chosen
        logits = self._forward(layout, None if generated else 0)
        return logits, logits.argmax(-1)

    def _capture_each(self, pool: Any) -> None:
        self._chosen = torch.zeros(self._most_kept, dtype=torch.int64, device=self.device)  # tokens of the step before are still asked for
        self._parts = {kind: self._captured(self.layouts[kind], pool, None if kind else 0) for kind in (False, True)}

    # ------------------------------------------------------------------ is it so

    def _check_rows(self) -> None:
        """Answers to a few prompts do not change with their places among the rows, nor with their neighbours; refused where they do."""
        pages = self.pool.keys[0].shape[0] // self.pool.size
        for generated in (True, False):
            most = min(pages, self.sizes.sequences, (self.sizes.generated if generated else self.sizes.prompted) // CHECKED)
            one, other = (self._row_logits(generated, order, changed) for order, changed in ((range(most), 0), (range(most - 1, -1, -1), 1)))
            if any(not torch.equal(one[number], other[number]) for number in range(most) if number % 3):
                kind = "generated tokens" if generated else "prompts"
                raise ModelError(f"--invariant: on this device bits of {kind} change with the rows beside them", "leave --invariant out")

    def _row_logits(self, generated: bool, order: Sequence[int], changed: int) -> dict[int, Tensor]:
        """Of sequences of a few tokens, in that order; every third of other tokens."""
        step, tokens = [], []
        for number in order:
            count = 1 + 5 * number % min(self.pool.size, CHECKED)
            one = Scheduled(number, 0 if generated else count, 1, length=count, pages=[number])
            step.append(Row(one, 0, count))
            tokens.append([(31 * number + 7 * place + (number % 3 == 0) * changed) % self.words for place in range(count)])
        return dict(zip(order, self.logits(tuple(step), tokens), strict=True))
