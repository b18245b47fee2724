"""Ways to make a step smaller: options of `fit` that change it, what they are called and what they cost. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretell.hardware.types import Cluster
from foretell.quantities import Prediction
from foretell.search.space.preferences import chunks_for
from foretell.trace.recipe import Recipe

if TYPE_CHECKING:
    from foretell.simulate.memory.remedies import Outlook

RANK = 16
"""Of the LoRA adapters that are offered."""
_TYPED = {
    "hardware": "--on", "micro_batch": "--micro-batch", "accumulate": "--accumulate", "recompute": "--recompute",
    "optimizer": "--optimizer", "precision": "--precision", "lora": "--lora", "nf4": "--nf4", "loss_chunks": "--loss-chunks",
    "expandable_segments": "--expandable-segments", "compile": "--compile-how", "channels_last": "--channels-last",
}  # fmt: skip
"""Option of `api.fit` → how it is typed."""
Attempt = Callable[[Mapping[str, Any]], Prediction]
"""Predict the same step with other options of `fit`."""
Prepare = Callable[[Sequence[Mapping[str, Any]], float], None]
"""Told what is tried next, and how many seconds there are: what can be done side by side may be done at once."""


@dataclass(frozen=True, kw_only=True)
class OptionChange:
    """Options that change together."""

    options: Mapping[str, Any]
    change: str
    costs: str = ""
    same_maths: bool = True

    @property
    def flag(self) -> str:
        """As it is typed."""
        return " ".join(
            word if value is True else f"{word} {value}"
            for name, word in _TYPED.items() if (value := self.options.get(name)) is not None
        )  # fmt: skip

    def __add__(self, other: OptionChange) -> OptionChange:
        """Both; where both set an option, the other's value counts."""
        costs = "; ".join(dict.fromkeys((self.costs, other.costs)))
        return OptionChange(
            options={**self.options, **other.options}, change=f"{self.change}, {other.change}", costs=costs,
            same_maths=self.same_maths and other.same_maths,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """What the answer was asked with, as far as a way may change it."""

    recipe: Recipe
    cluster: Cluster
    on: str | None
    """As it was typed; None where no command line can say it."""
    micro_batch: int = 1
    resizable: bool = True
    """Whether the batch can be made smaller."""
    blocks: bool = True
    expandable: bool = False

    @property
    def training(self) -> bool:
        return self.recipe.mode == "train"


# ---------------------------------------------------------------------- classes of ways, the cheapest first


def same_maths(asked: FitRequest, outlook: Outlook) -> list[OptionChange]:
    """On the same devices, computing the same."""
    return [way for way in thrifty(asked, outlook) if way.same_maths]


def numerics(asked: FitRequest, outlook: Outlook) -> list[OptionChange]:
    """On the same devices: smaller batches where statistics depend on them; other formats, alone, with what is thrifty, and both."""
    more, formats = thrifty(asked, outlook), [*_bf16(asked), *_nf4(asked)]
    both = [_sum(formats)] if len(formats) > 1 else []
    return [
        *(way for way in more if not way.same_maths), *formats, *(one + way for one in formats for way in more), *both,
        *(one + way for one in both for way in more),
    ]  # fmt: skip


def adapters(asked: FitRequest, outlook: Outlook) -> list[OptionChange]:
    """Training LoRA adapters instead of the model, over a base in bf16 or in four bits."""
    if not asked.training or asked.recipe.lora is not None or asked.recipe.freeze:
        return []
    plain = OptionChange(options={"lora": RANK}, change="train LoRA adapters only", costs="trains a different thing", same_maths=False)
    adapted = replace(asked, recipe=replace(asked.recipe, lora=RANK))
    formats = [*_bf16(asked), *_nf4(adapted)]
    bases = [plain, *(plain + one for one in formats), *([plain + _sum(formats)] if len(formats) > 1 else [])]
    return [*bases, *(base + way for base in bases for way in thrifty(asked, outlook))]


def spread(asked: FitRequest, spec: str, times: int, outlook: Outlook) -> list[OptionChange]:
    """On so many times the devices, with the batch of a step kept where they can share it: plain, then thriftier."""
    size, steps = asked.micro_batch, asked.recipe.accumulate
    options: dict[str, Any] = {"hardware": spec}
    shared = True
    if steps % times == 0:
        steps //= times
    elif asked.resizable and size * steps % times == 0:
        size, steps = _largest(size, size * steps // times)
    else:
        shared = False
    options |= {"micro_batch": size} if size != asked.micro_batch else {}
    options |= {"accumulate": steps} if steps != asked.recipe.accumulate else {}
    costs = f"{times} times the devices" + ("" if shared else " and samples a step")
    base = OptionChange(options=options, change=f"shard over {asked.cluster.count * times} devices", costs=costs, same_maths=shared)
    there = replace(asked, micro_batch=size, recipe=replace(asked.recipe, accumulate=steps))
    return [base, *(base + way for way in thrifty(there, outlook) if way.same_maths)]


def _largest(most: int, samples: int) -> tuple[int, int]:
    """The largest micro-batch up to `most` that divides the samples, and how many there are."""
    size = max(number for number in range(1, most + 1) if samples % number == 0)
    return size, samples // size


def thrifty(asked: FitRequest, outlook: Outlook) -> list[OptionChange]:
    """What leaves devices and weights alone: single ways first, then together; the last is the strongest."""
    free, halves, again = list(_free(asked, outlook)), list(_halves(asked, outlook)), list(_recomputed(asked))
    both = [[way for way in (half, one) if way is not None] for one in (None, *again) for half in (None, *halves)]
    found = [*free, *halves, *again]
    for pair in both:
        found += [_sum(pair)] if len(pair) > 1 else []
        found += [_sum([*pair, *free])] if free and len(pair) + len(free) > 1 else []
    return found


def _sum(several: Iterable[OptionChange]) -> OptionChange:
    first, *rest = several
    for way in rest:
        first = first + way
    return first


# ---------------------------------------------------------------------- single ways


def _free(asked: FitRequest, outlook: Outlook) -> Iterator[OptionChange]:
    """What costs no time."""
    kind, _, variant = asked.recipe.optimizer.partition("-")
    if asked.training and kind.startswith("adam") and variant != "fused":
        yield OptionChange(options={"optimizer": f"{kind}-fused"}, change="use the fused optimizer", costs="none: it is faster")
    if (chunks := _chunks(asked, outlook)) > 1:
        yield OptionChange(
            options={"loss_chunks": chunks}, change=f"output layer and loss in {chunks} chunks of the tokens",
            costs="a little time; sums over tokens are rounded otherwise",
        )  # fmt: skip
    if not asked.expandable and outlook.loose > 0:
        yield OptionChange(
            options={"expandable_segments": True}, change="let allocator segments grow",
            costs="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )  # fmt: skip


def _chunks(asked: FitRequest, outlook: Outlook) -> int:
    """In how many chunks the loss leaves little of the logits; 1 where they are not what is large, or cannot be in chunks."""
    recipe = asked.recipe
    if not asked.training or recipe.loss_chunks > 1 or recipe.compile not in ("none", "blocks") or recipe.precision.startswith(("fp16", "fsdp-fp16")):
        return 1
    return chunks_for(outlook.logits, outlook.rows, asked.cluster.device.memory_bytes)


def _halves(asked: FitRequest, outlook: Outlook) -> Iterator[OptionChange]:
    """Smaller micro-batches, with as many more of them a step."""
    size = asked.micro_batch
    while asked.resizable and size > 1:
        size = next(number for number in range(size // 2, 0, -1) if asked.micro_batch % number == 0)
        more = asked.recipe.accumulate * asked.micro_batch // size
        if not asked.training:
            yield OptionChange(options={"micro_batch": size}, change=f"a batch of {size}", costs="smaller kernels")
            continue
        alike = not outlook.batch_norm
        yield OptionChange(
            options={"micro_batch": size, "accumulate": more}, change=f"micro-batches of {size}, {more} a step",
            costs="smaller kernels" if alike else "batch statistics of fewer samples", same_maths=alike,
        )  # fmt: skip


def _recomputed(asked: FitRequest) -> Iterator[OptionChange]:
    known = {
        "selective": ("recompute all but products and attention", "a little more compute"),
        "full": ("recompute every block in backward", "about a third more compute"),
    }
    order = ("none", *known)
    for how in order[order.index(asked.recipe.recompute) + 1 :] if asked.training and asked.blocks and asked.recipe.recompute in order else ():
        yield OptionChange(options={"recompute": how}, change=known[how][0], costs=known[how][1])


def _bf16(asked: FitRequest) -> Iterator[OptionChange]:
    able = "bfloat16" in asked.cluster.device.peak_flops_per_second
    if able and asked.recipe.precision in ("fp32", "bf16-autocast", "fsdp-bf16"):
        what = "weights and optimizer state" if asked.training else "weights"
        yield OptionChange(options={"precision": "bf16"}, change=f"keep {what} in bf16", costs="changes the numerics", same_maths=False)


def _nf4(asked: FitRequest) -> Iterator[OptionChange]:
    if asked.recipe.lora is not None and not asked.recipe.base:
        yield OptionChange(options={"nf4": True}, change="keep the frozen base in 4 bits", costs="changes the numerics", same_maths=False)
