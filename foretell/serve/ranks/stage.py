"""One rank's part of a decoder: its blocks of the pipeline, its share of every layer, the pages of its own heads.

The model is split by the rules that training splits it by (`runtime/parallel/`): its code stays as it is. Its attention is taken
over from outside with the heads that are here.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretell.errors import UserError
from foretell.plan.types import Mesh, Pipeline, Plan, Split
from foretell.runtime.parallel import ranks as places
from foretell.runtime.parallel.pipeline.ghost import is_ghost
from foretell.runtime.parallel.pipeline.part import BoundaryTensor
from foretell.runtime.parallel.pipeline.stages import RankStages, cut
from foretell.runtime.parallel.tensor import split as tensor
from foretell.runtime.parallel.tensor import values
from foretell.serve.formats import KvPool
from foretell.serve.ranks.controller import RankLayout
from foretell.serve.runner import AGREES, PROBE_TOKENS, StepRunner, context_of, words_in
from foretell.simulate.serving.scheduler import Row
from foretell.simulate.serving.scheduler import Sequence as Scheduled
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.serving.packed import Attend, Cached, How, Packed

EXAMPLE = 13
"""Tokens of the step that a model is split by; what crosses from stage to stage has as many along one dimension."""
NOTHING = Cached(0, 0, 0, None)


class _Stage(nn.Module):
    """A decoder called as a server calls it, with an attention that can be changed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.packed = Packed(model)
        self.attend: Attend = _causal

    def forward(self, tokens: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        return self.packed(tokens, positions, keep, self.attend)


def _causal(how: How, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of one sequence, in calls that the rules of splitting know."""
    q, k, v = (one.transpose(0, 1)[None] for one in (query, key, value))
    found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale, enable_gqa=q.shape[1] != k.shape[1])
    return found[0].transpose(0, 1)


class ServedPart:
    """This rank's part, called like the whole (`Packed`): logits on the last stage, nothing of meaning elsewhere."""

    def __init__(self, model: nn.Module, layout: RankLayout, device: torch.device) -> None:
        whole = _Stage(model.to(device))
        self.layout, self.device = layout, device
        self.plan = _plan(whole, layout)
        self.ranks = places.start(self.plan, device=device.type)
        _check_heads(whole, layout.tp)
        if layout.pp > 1 and next(model.parameters()).dtype == torch.float32 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")  # whose shapes are known without numbers; grouped_mm's are not in fp32
        self.numbered = whole.packed.named
        """Its layers say which they are."""
        self._kept: list[Any] = []
        self._sending: list[tuple[Any, Tensor]] = []
        some = torch.arange(EXAMPLE, device=device)
        batch = {"tokens": some, "positions": some, "keep": some[-1:]}
        with torch.no_grad():
            found = tensor.prepare(whole, self.plan, self.ranks, batch, self._keep)
        self.stages: RankStages | None = None
        self.part: nn.Module = whole
        if layout.pp > 1:
            self.stages = cut(whole, self.plan, self.ranks, batch, self._keep)
            (self.part,) = self.stages.parts
            self.index = self.stages.indices[0]
            if found is not None:
                self.stages.stages[self.index].gather = tensor.gathered
        self.team = None
        if found is not None:
            self.team = tensor.apply(self.part, found.derived, found.team).team

    @property
    def is_last(self) -> bool:
        return self.stages is None or self.stages.has_last

    def __call__(self, tokens: Tensor, positions: Tensor, keep: Tensor, attend: Attend) -> Tensor:
        """Compute a step; its tokens lie packed, as many as there are."""
        self.part.attend = self._on_parts(attend)
        batch = {"tokens": tokens, "positions": positions, "keep": keep}
        with torch.no_grad():
            if self.stages is None:
                self._kept.append(self.part(**batch))
            else:
                self._stage(batch)
        if not self.is_last:
            return tokens
        found: Tensor = tensor.gathered(self._kept.pop())
        return found

    def _stage(self, batch: dict[str, Tensor]) -> None:
        assert self.stages is not None
        stage, wire = self.stages.stages[self.index], self.stages.wire
        received = tuple(_sized(form, len(batch["tokens"])).empty(self.device).detach() for form in self.stages.crossing[self.index])
        for value in received:
            wire.receive(value, self.index - 1)
        given = stage.run(self.part, received, batch)
        stage.losses.clear()
        self._sending = [(work, value) for work, value in self._sending if not work.is_completed()]
        if not stage.is_last:
            self._sending += [(wire.begin_send(value.detach(), self.index + 1), value) for value in given]

    def _keep(self, output: Tensor, _: Any = None) -> Tensor:
        """In the place of a loss: what the model gives is wanted."""
        self._kept[:] = [output]
        return output.new_zeros(()) if type(output) is Tensor else torch.zeros(())

    def _on_parts(self, attend: Attend) -> Attend:
        """Attention over the heads of this rank. Blocks of other stages are only run for their shapes, the first time: a model whose
        layers are known by their order alone counts those that are here."""
        turn = itertools.count()

        def attended(how: How, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if is_ghost(query):
                return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
            if not self.numbered:
                how = how._replace(layer=next(turn))
            if self.team is None:
                return attend(how, query, key, value)
            if not all(isinstance(one, values.SplitTensor) and one._spec.place is not None for one in (query, key, value)):
                raise UserError("attention of this model is not split by heads", "--tp 1, and --pp for its blocks")
            found = attend(how, *(values.plain(one).contiguous() for one in (query, key, value)))
            return values.split(found, query._spec.place, self.team)  # type: ignore[attr-defined]

        return attended


class StageRunner(StepRunner):
    """Steps on this rank: the model's part and pages of its own heads and layers."""

    def __init__(self, model: nn.Module, layout: RankLayout, device: torch.device, pages: int, size: int) -> None:
        self.model = model.eval()
        self.device, self.dtype = device, next(model.parameters()).dtype
        self.words, self.context = words_in(model), context_of(model)
        prompt = [(7 * place + 3) % self.words for place in range(min(PROBE_TOKENS, pages * size))]
        own = _own(model, prompt)
        self.part = ServedPart(model, layout, device)
        self.packed = self.part  # type: ignore[assignment]
        self.layers = self._layers()
        self.pool = KvPool(self.layers, pages, size, self.dtype, device)
        self._agrees_with(prompt, own)

    @property
    def weights_bytes(self) -> int:
        held = {id(one): one for one in (*self.part.part.parameters(), *self.part.part.buffers())}
        return sum(one.to_local().nbytes if hasattr(one, "to_local") else one.nbytes for one in held.values())

    def close(self) -> None:
        """The process ends with it."""

    def _layers(self) -> list[Cached]:
        """What the layers here keep of a token: one forward of two tells."""
        found: dict[int, Cached] = {}

        def attend(how: How, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            found[how.layer] = Cached(key.shape[1], key.shape[2], value.shape[2], how.window)
            return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

        two = torch.arange(2, device=self.device)
        self.packed(two, two, two[1:], attend)
        return [found.get(layer, NOTHING) for layer in range(max(found, default=-1) + 1)]

    def _agrees_with(self, prompt: list[int], own: Tensor) -> None:
        """As `StepRunner` checks itself: all ranks by pages, in two pieces, beside the whole model's own forward."""
        half, size = len(prompt) // 2, self.pool.size
        pages = list(range(-(-len(prompt) // size)))
        for start, end in ((0, half), (half, len(prompt))):
            if end > start:
                ours = self.logits((Row(Scheduled(0, len(prompt), 1, pages=pages), start, end - start),), [prompt[start:end]])
        if self.part.is_last:
            off = float((ours[-1].float() - own.float().to(ours.device)).abs().max() / own.float().abs().max().clamp_min(1e-6))
            if not off <= AGREES.get(self.dtype, 1e-3):
                raise UserError(f"{type(self.model).__name__} on ranks is {off:.1%} off its own forward", "serve it by one process")


def _own(model: nn.Module, prompt: list[int]) -> Tensor:
    """Logits of the next token, by the model itself, before anything of it is split."""
    device = next(model.parameters()).device
    with torch.no_grad():
        output: Any = model(torch.tensor([prompt], device=device))
    found: Tensor = output.logits if hasattr(output, "logits") else output[0] if isinstance(output, tuple) else output
    return found[0, -1].clone()


def _plan(model: nn.Module, layout: RankLayout) -> Plan:
    """The plan of a run without training: blocks evenly over the stages, the first stages more where they do not divide."""
    blocks = find_blocks(model)
    if len(blocks) < layout.pp:
        raise UserError(f"--pp {layout.pp} for a model of {len(blocks)} blocks", f"--pp {max(1, len(blocks))} or less")
    each, more = divmod(len(blocks), layout.pp)
    begins = [stage * each + min(stage, more) for stage in range(1, layout.pp)]
    pipeline = Pipeline(schedule="gpipe", cuts=tuple(blocks[place] for place in begins)) if layout.pp > 1 else None
    split = Split(sequence=False, loss=False) if layout.tp > 1 else None
    mesh = Mesh(tp=layout.tp, pp=layout.pp)
    return Plan(model={}, hardware="cpu", mesh=mesh, pipeline=pipeline, split=split, accumulate=layout.pp, precision="fp32")


def _check_heads(whole: _Stage, tp: int) -> None:
    found: set[tuple[int, int]] = set()

    def attend(how: How, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found.add((query.shape[1], key.shape[1]))
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    two = torch.arange(2, device=next(whole.parameters()).device)
    whole.packed(two, two, two[1:], attend)
    for heads, kept in sorted(found):
        if heads % tp or kept % tp:
            told = f"{heads} heads" if heads == kept else f"{heads} heads of queries and {kept} of keys and values"
            fits = [str(one) for one in range(1, tp) if not heads % one and not kept % one]
            raise UserError(f"--tp {tp} does not divide {told}", f"--tp {' or '.join(fits)}")


def _sized(form: BoundaryTensor, tokens: int) -> BoundaryTensor:
    """What crosses, for a step of so many tokens."""
    return BoundaryTensor(tuple(tokens if place == 1 and size == EXAMPLE else size for place, size in enumerate(form.shape)), form.dtype)


