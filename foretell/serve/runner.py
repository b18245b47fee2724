"""One step on tensors: tokens packed into one row, keys and values written to pages, attention over them, logits, tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretell.errors import ModelError
from foretell.serve.formats import KV_AGREES, KvPool
from foretell.serve.sampling import ChosenToken, Sampling, choose
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.scheduler import Row, Step
from foretell.simulate.serving.scheduler import Sequence as Asked
from foretell.trace.serving.packed import REMEDY, How, Packed, layers_of

PROBE_TOKENS = 12
"""Of the prompt that pages and the model's own forward must agree on."""
AGREES = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Of the largest logit: how far both may be apart; or four times as far as the model is from itself among other rows."""


class _Rows:
    """Where the tokens of one step are and what they attend to; the attention of every layer."""

    def __init__(self, pool: KvPool, step: Step, device: torch.device) -> None:
        self.pool = pool
        self.rows: list[tuple[int, int, int, Tensor]] = []
        written, first = [], 0
        for sequence, start, count in step:
            pages = torch.tensor(sequence.pages)
            places = torch.arange(start + count)
            slots = (pages[places // pool.size] * pool.size + places % pool.size).to(device)
            written.append(slots[start:])
            self.rows.append((first, count, start, slots))
            first += count
        self.written = torch.cat(written)

    def __call__(self, how: How, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.pool.write(how.layer, self.written, key, value)
        found = []
        for first, count, start, slots in self.rows:
            near = slots if how.window is None else slots[max(0, start + 1 - how.window) :]
            mine, its = self.pool.read(how.layer, near, query.dtype)
            found.append(attended(how, query[first : first + count], mine, its, start + count - len(near)))
        return torch.cat(found)


def attended(how: How, query: Tensor, key: Tensor, value: Tensor, gone: int) -> Tensor:
    """Attention of the last tokens of a sequence to those before them; `gone` first ones are left out of `key`. The reference."""
    count, total = query.shape[0], key.shape[0]
    place = torch.arange(total - count, total, device=query.device)[:, None]
    other = torch.arange(total, device=query.device)[None]
    seen = other <= place
    if how.window is not None:
        seen &= other > place - how.window
    q, k, v = (one.transpose(0, 1)[None] for one in (query, key.to(query.dtype), value.to(query.dtype)))
    grouped = q.shape[1] != k.shape[1]
    if how.cap is None:
        mask = None if bool(seen.all()) else seen
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scale, enable_gqa=grouped)
        return found[0].transpose(0, 1)
    if grouped:
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = (q @ k.transpose(-2, -1)) * how.scale
    scores = torch.tanh(scores / how.cap) * how.cap
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1, dtype=torch.float32).to(v.dtype)
    return (shares @ v)[0].transpose(0, 1)


class Launched(Protocol):
    """A step under way."""

    def collect(self) -> list[ChosenToken]:
        """Its tokens, one for each row that samples; waits for them."""


class Computed:
    """A step that is done as soon as it is launched."""

    def __init__(self, tokens: list[ChosenToken]) -> None:
        self.tokens = tokens

    def collect(self) -> list[ChosenToken]:
        return self.tokens


class StepRunner:
    """A model, its pages and the device they are on: each step computed at once, in plain PyTorch."""

    ahead = False
    """A step can be launched before the tokens of the one before are known."""
    group = 0
    """Rows that are sampled at a time, always; 0: as many as there are, a few at a time."""

    def __init__(self, model: nn.Module, pages: int, size: int, *, check: bool = True, kv: str = "bf16") -> None:
        self.model = model.eval()
        first = next(one for one in model.parameters() if one.dtype in AGREES)  # not one that is held in fewer bits
        self.device, self.dtype = first.device, first.dtype
        self.words, self.context = words_in(model), context_of(model)
        self.packed = Packed(model)
        self.layers = layers_of(self.packed, self.device)
        self.pool = KvPool(self.layers, pages, size, self.dtype, self.device, kv)
        self.notes: list[str] = []
        """What a user should know of how it runs."""
        self._known: tuple[Tensor, float] | None = None
        if check:
            self._agrees()

    def launch(self, step: Step, tokens: Sequence[Sequence[int]], asked: Sequence[tuple[Sampling, int]]) -> Launched:
        """Compute a step: the tokens of each row, and how those that sample do. One token for each of these."""
        logits = self.logits(step, tokens)
        return Computed(choose(logits, asked, self.group) if asked else [])

    def close(self) -> None:
        """The model is as it was."""
        self.packed.release()

    def logits(self, step: Step, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Of the last token of each row that samples; of the very last where none does."""
        flat = [one for row in tokens for one in row]
        given, places, kept = (torch.tensor(one, device=self.device) for one in (flat, *places_of(step)))
        return self.packed(given, places, kept, _Rows(self.pool, step, self.device))

    def _agrees(self) -> None:
        """Pages give what the model's own forward gives, for one short prompt in two chunks; refused where they do not."""
        words = self.words
        count = min(PROBE_TOKENS, self.pool.keys[0].shape[0])
        prompt = [(7 * place + 3) % words for place in range(count)]
        one = Asked(0, count, 1, pages=Pages(self.pool.keys[0].shape[0] // self.pool.size, self.pool.size).take(-(-count // self.pool.size)))
        half = count // 2
        if half:
            self.logits((Row(one, 0, half),), [prompt[:half]])
        ours = self.logits((Row(one, half, count - half),), [prompt[half:]])
        own, noise = self._own_logits(prompt)
        off = _apart(ours[-1], own)
        if not off <= max(AGREES.get(self.dtype, 1e-3), 4 * noise, KV_AGREES[self.pool.kv]):
            name = type(self.model).__name__
            raise ModelError(f"{name} by pages is {off:.1%} off its own forward: its attention does more than pages know", REMEDY)

    def _own_logits(self, prompt: list[int]) -> tuple[Tensor, float]:
        """The model's own forward, as it was before anything was done to it: of the last token; and how far it is from itself where
        kernels are chosen for another number of rows, as they are in 16 bits."""
        if self._known is None:
            self.packed.release()
            more = {"use_cache": False} if self.packed.named else {}
            found = []
            for rows in (1, 3):
                with torch.no_grad():
                    output: Any = self.model(torch.tensor([prompt] * rows, device=self.device), **more)
                own = output.logits if hasattr(output, "logits") else output[0] if isinstance(output, tuple) else output
                found.append(own[0, -1].clone())
            self._known = found[0], _apart(*found)
        return self._known


class TokenRunner(StepRunner):
    """Each token by itself: its bits depend on no neighbour, however a processor treats several rows."""

    group = 1

    def logits(self, step: Step, tokens: Sequence[Sequence[int]]) -> Tensor:
        found = []
        for (sequence, start, count), given in zip(step, tokens, strict=True):
            for place, token in zip(range(start, start + count), given, strict=True):
                logits = super().logits((Row(sequence, place, 1),), [[token]])
            if start + count == sequence.length:
                found.append(logits)
        return torch.cat(found) if found else logits


def _apart(one: Tensor, other: Tensor) -> float:
    """Of the largest."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max().clamp_min(1e-6))


def places_of(step: Step) -> tuple[list[int], list[int]]:
    """Of each token its place in its sequence; and which tokens of the step have their logits wanted."""
    positions = [place for row in step for place in range(row.start, row.start + row.count)]
    last, keep = -1, []
    for row in step:
        last += row.count
        if row.samples:
            keep.append(last)
    return positions, keep or [last]


def words_in(model: nn.Module) -> int:
    """Tokens that a model knows."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if table is None:
        table = next((one for one in model.modules() if isinstance(one, nn.Embedding)), None)
    return int(table.weight.shape[0]) if table is not None else 2


def context_of(model: nn.Module) -> int:
    """Tokens of a sequence that a model's positions allow."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None) or getattr(model, "context", None)
    return int(found) if isinstance(found, int) else 2**31
