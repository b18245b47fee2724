"""Steps on a GPU: attention by kernels over pages, generation replayed as CUDA graphs, and the host one step ahead.

    host    │ plan 1, launch │ plan 2, launch │ tokens of 1 │ plan 3, launch │ tokens of 2 │
    device  │     one copy in │ step 1 │ step 2          │ step 3 ...

All that a step needs from the host goes in one copy. A token that the step before has chosen and the host has not seen is
taken from where it lies on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from foretell.serve import siblings
from foretell.serve.runner import Launched, StepRunner
from foretell.serve.sampling import ChosenToken, Drawn, Sampling
from foretell.simulate.serving.replays import generating_sizes, mixed_sizes
from foretell.simulate.serving.scheduler import Row, Step
from foretell.trace.serving.packed import IN_TURN, How, layers_of

TURNS = 3
"""Buffers of what goes to and comes from the device: one is filled while the others may be under way."""

_library = torch.library.Library("foretell_pages", "DEF")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, int window, float scale, float cap) -> Tensor")
_rows: list[PagedRows] = []
"""Whose turn it is; the last. Compiled code knows attention as one op, which finds here what its step is about."""


def _shape(query: Tensor, key: Tensor, value: Tensor, layer: int, window: int, scale: float, cap: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _compute(query: Tensor, key: Tensor, value: Tensor, layer: int, window: int, scale: float, cap: float) -> Tensor:
    return rows_now().attend(query, key, value, layer, window, scale, cap)


def rows_now() -> PagedRows:
    """Of the step that is computed."""
    return _rows[-1]


_library.impl("attend", _shape, "Meta")
_library.impl("attend", _compute, "CUDA")


def by_pages(how: How, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The attention of one layer, as one op."""
    found: Tensor = torch.ops.foretell_pages.attend(query, key, value, how.layer, how.window or 0, how.scale, how.cap or 0.0)
    return found


@dataclass(eq=False)
class PagedRows:
    """What the attention of a step is about, on the device. Rows that generate come first, one token each; the others have a
    length of 0 and tiles, which are computed after."""

    runner: GraphRunner
    slots: Tensor
    """Of each token."""
    table: Tensor
    """Pages of each row."""
    lengths: Tensor
    """Tokens of the rows that generate, the new one included; 0 of others."""
    tiles: Tensor | None
    """Of the rows that do not: tiles of their queries."""
    layer: int = IN_TURN
    """The last that was called."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, window: int, scale: float, cap: float) -> Tensor:
        from foretell.kernels import paged_attention

        self.layer = self.layer + 1 if layer == IN_TURN else layer
        pool = self.runner.pool
        keys, values = pool.keys[self.layer], pool.values[self.layer]
        query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
        paged_attention.write(keys, values, key, value, self.slots)
        out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype, device=query.device)
        count = self.lengths.shape[0]
        if count:
            paged_attention.decode(
                query[:count], keys, values, self.table, self.lengths, out[:count], page=pool.size, scale=scale, window=window, cap=cap
            )
        if self.tiles is not None:
            paged_attention.chunk(query, keys, values, self.table, self.tiles, out, page=pool.size, scale=scale, window=window, cap=cap)
        return out


class StepLayout(NamedTuple):
    """Where in one row of numbers a step has what; as large as the step, or as a graph that is replayed for smaller ones too."""

    tokens: int
    rows: int
    """Sequences."""
    kept: int
    """Rows whose logits are wanted."""
    tiles: int
    wide: int
    """Pages of a sequence."""

    @property
    def size(self) -> int:
        return 3 * self.tokens + self.kept + self.rows + 4 * self.tiles + self.rows * self.wide

    def of(self, numbers: Any) -> tuple[Any, ...]:
        """Tokens, places, slots, what to keep, lengths, tiles, pages: views of a tensor or an array."""
        found, first = [], 0
        for count in (self.tokens, self.tokens, self.tokens, self.kept, self.rows, 4 * self.tiles, self.rows * self.wide):
            found.append(numbers[first : first + count])
            first += count
        return (*found[:5], found[5].reshape(self.tiles, 4), found[6].reshape(self.rows, self.wide))

    def fill(
        self, out: np.ndarray, step: Sequence[Row], tokens: Sequence[Sequence[int]], page: int, tall: int, generating: bool = True
    ) -> None:
        """Write a step; what is larger than it belongs to nobody, and is written nowhere. `generating`: first rows of one token are."""
        given, places, slots, keep, lengths, tiles, table = self.of(out)
        lengths[:], tiles[:], slots[:] = 0, 0, -1
        first = tile = sampling = 0
        for row, (sequence, start, count) in enumerate(step):
            pages = sequence.pages
            table[row, : len(pages)] = pages
            end, generating = first + count, generating and count == 1
            given[first:end] = tokens[row]
            if generating:
                places[first], lengths[row] = start, start + 1
                slots[first] = pages[start // page] * page + start % page
            else:
                places[first:end] = where = np.arange(start, start + count)
                slots[first:end] = table[row, where // page] * page + where % page
                for at in range(0, count, tall):
                    tiles[tile] = (row, first + at, start + at, min(tall, count - at))
                    tile += 1
            if start + count == sequence.length:
                keep[sampling] = end - 1
                sampling += 1
            first = end
        given[first:], places[first:], keep[sampling:] = 0, 0, 0


class UnderWay:
    """A step that was launched."""

    def __init__(self, drawn: Drawn, ids: Tensor, arrived: torch.cuda.Event) -> None:
        self.drawn, self.ids, self.arrived = drawn, ids, arrived

    def collect(self) -> list[ChosenToken]:
        self.arrived.synchronize()
        return self.drawn.tell(self.ids.tolist())


class NothingChosen:
    """A step in which no row samples."""

    def collect(self) -> list[ChosenToken]:
        return []


@dataclass(eq=False)
class CapturedStep:
    """A step of so many tokens, ready to be replayed."""

    layout: StepLayout
    replay: Any


class GraphRunner(StepRunner):
    """A model on a CUDA device."""

    ahead = True

    def __init__(
        self, model: nn.Module, pages: int, size: int, *, running: int, tokens: int, longest: int = 0, check: bool = True, compiled: bool = True,
        graphs: bool = True,
    ) -> None:  # fmt: skip
        from foretell.kernels.paged_attention import TALL

        self._tall = TALL
        self.graphs: dict[int, CapturedStep] = {}
        """Of so many sequences that generate."""
        self._mixed: dict[int, CapturedStep] = {}
        """Of so many tokens, some of them of prompts."""
        self.running, self.most = running, tokens
        super().__init__(model, pages, size, check=False)
        self.wide = -(-min(longest or self.context, self.context, pages * size) // size)
        """Pages of a sequence at most."""
        self._room = self._most_numbers()
        pin = self.device.type == "cuda"
        self._pinned = [torch.empty(self._room, dtype=torch.int32, pin_memory=pin) for _ in range(TURNS)]
        self._told = [torch.empty(max(running, tokens), dtype=torch.int64, pin_memory=pin) for _ in range(TURNS)]
        self._given = torch.zeros(self._room, dtype=torch.int32, device=self.device)
        self._latest = self._chosen = torch.zeros(max(running, tokens), dtype=torch.int64, device=self.device)
        self._events = [torch.cuda.Event() for _ in range(TURNS)]
        self._turn = 0
        self._logits = torch.empty(0, dtype=self.dtype, device=self.device)
        self._compiled: list[nn.Module] = []
        self._moved: list[nn.Parameter] = []
        if check:
            self._agrees()
        if compiled:
            self._compile()
        if compiled and check:
            self._agrees()
        if graphs:
            self._capture_all()

    def close(self) -> None:
        for one in self._compiled:
            one._compiled_call_impl = None
        siblings.apart(self._moved)
        self._compiled, self._moved, self.graphs, self._mixed, self._logits = [], [], {}, {}, self._logits[:0].clone()
        super().close()

    @property
    def _most_kept(self) -> int:
        """Rows with logits of what is computed at once."""
        return max(2, self.running)

    def _most_numbers(self) -> int:
        """Of what is computed at once."""
        rows = max(2, self.running)
        return self._layout(max(2, self.most), rows, rows, self.most // self._tall + self.running + 1).size

    # ------------------------------------------------------------------ a step

    def launch(self, step: Step, tokens: Sequence[Sequence[int]], asked: Sequence[tuple[Sampling, int]]) -> Launched:
        turn = self._turn = (self._turn + 1) % TURNS
        self._events[turn].synchronize()  # the step that used these buffers, TURNS ago
        graph = self._graph_for(step)
        layout = graph.layout if graph is not None else self._layout_of(step)
        layout.fill(self._pinned[turn].numpy(), step, tokens, self.pool.size, self._tall)
        self._given[: layout.size].copy_(self._pinned[turn][: layout.size], non_blocking=True)
        if graph is None:
            logits, best = self._forward(layout, sum(row.count == 1 for row in step)), None
        else:
            graph.replay()
            logits, best = self._logits[: len(asked)], self._latest[: len(asked)]
        return self._sampled(turn, logits, asked, best)

    def _sampled(self, turn: int, logits: Tensor, asked: Sequence[tuple[Sampling, int]], best: Tensor | None) -> Launched:
        """Tokens of a step are on their way."""
        if not asked:
            self._events[turn].record()
            return NothingChosen()
        drawn = Drawn(logits, asked, best, self.group)
        if drawn.ids is not best:
            self._latest[: len(asked)].copy_(drawn.ids)
        told = self._told[turn][: len(asked)]
        told.copy_(drawn.ids, non_blocking=True)
        self._events[turn].record()
        return UnderWay(drawn, told, self._events[turn])

    def logits(self, step: Step, tokens: Sequence[Sequence[int]]) -> Tensor:
        torch.cuda.synchronize(self.device)
        layout = self._layout_of(step)
        layout.fill(self._pinned[0].numpy(), step, tokens, self.pool.size, self._tall)
        self._given[: layout.size].copy_(self._pinned[0][: layout.size])
        return self._forward(layout)

    def _layout(self, tokens: int, rows: int, kept: int, tiles: int) -> StepLayout:
        return StepLayout(tokens, rows, kept, tiles, self.wide)

    def _layout_of(self, step: Step) -> StepLayout:
        generating = next((place for place, row in enumerate(step) if row.count != 1), len(step))
        tiles = sum(-(-row.count // self._tall) for row in step[generating:])
        return self._layout(sum(row.count for row in step), len(step), max(1, sum(row.samples for row in step)), tiles)

    def _graph_for(self, step: Step) -> CapturedStep | None:
        if all(row.count == 1 and row.samples for row in step):
            return next((one for size, one in self.graphs.items() if size >= len(step)), None)
        count = sum(row.count for row in step)
        return next((one for size, one in self._mixed.items() if size >= count), None) if len(step) <= self.running else None

    def _forward(self, layout: StepLayout, generating: int | None = None) -> Tensor:
        """`generating`: rows that may, if it is known."""
        given, places, slots, keep, lengths, tiles, table = layout.of(self._given)
        tokens = torch.where(given < 0, self._latest[(-1 - given).clamp_min(0)], given)
        _rows.append(PagedRows(self, slots, table, lengths[:generating], tiles if layout.tiles else None))
        try:
            return self.packed(tokens, places.long(), keep.long(), by_pages)
        finally:
            _rows.pop()

    # ------------------------------------------------------------------ compiled layers, and graphs

    def _compile(self) -> None:
        """Its repeated layers, as one piece of code for all of them."""
        lists = [one for one in self.model.modules() if isinstance(one, nn.ModuleList) and len(one) == len(self.layers)]
        if not lists or len({type(one) for one in lists[0]}) != 1:
            self.notes.append("not compiled: its layers are not all of one kind")
            return
        self._moved = siblings.lay_together(lists[0], lambda: layers_of(self.packed, self.device))
        self._compiled = list(lists[0])
        for one in self._compiled:
            one.compile(dynamic=True, backend=siblings.backend)

    def _capture_all(self) -> None:
        """Graphs in one pool; what is not captured is launched, which the notes say."""
        try:
            self._capture_each(torch.cuda.graph_pool_handle())
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            self.graphs, self._mixed, self._logits = {}, {}, self._logits[:0].clone()
            self.notes.append(f"no CUDA graphs: {str(error).splitlines()[0]}")
        self.graphs, self._mixed = dict(sorted(self.graphs.items())), dict(sorted(self._mixed.items()))

    def _capture_each(self, pool: Any) -> None:
        """The largest first."""
        for size in reversed(mixed_sizes(self.running, self.most)):
            self._mixed[size] = self._captured(self._layout(size, self.running, self.running, size // self._tall + self.running), pool)
        for size in reversed(generating_sizes(self.running)):
            self.graphs[size] = self._captured(self._layout(size, size, size, 0), pool)

    def _captured(self, layout: StepLayout, pool: Any, generating: int | None = None) -> CapturedStep:
        layout.fill(self._pinned[0].numpy(), (), (), self.pool.size, self._tall)
        self._given[: layout.size].copy_(self._pinned[0][: layout.size])

        def forward() -> None:
            logits = self._forward(layout, generating)
            self._chosen[: layout.kept].copy_(logits.argmax(-1))
            if not self._logits.numel():  # the first time of all, which no graph records
                self._logits = torch.zeros(self._most_kept, logits.shape[-1], dtype=logits.dtype, device=self.device)
            self._logits[: layout.kept].copy_(logits)  # of all graphs in one place: kept by each, they would be more than a gigabyte

        for _ in range(2):  # compiles, tunes, and leaves nothing to be made within the capture
            forward()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            forward()
        return CapturedStep(layout, graph.replay)
