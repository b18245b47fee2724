"""Ways to make a step faster: options of `fit` that change it, how one does it in a plain loop, and what it does to the maths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.hardware.types import Cluster
from foretell.quantities import Prediction
from foretell.search.advice.ways import OptionChange
from foretell.trace.flow.unaligned import ALIGNED
from foretell.trace.recipe import Recipe

EXACT, BOUNDED, CHANGES = "exact", "bounded", "changes the model"
"""What a change does to the maths: nothing but the order of sums; rounding; more than that."""
TIMES = (2, 4, 8, 16)
"""Larger micro-batches that are tried, as long as each gains."""
HOST_BOUND = 0.1
"""Share of a step that waits for the host, from which recorded launches are tried."""
LEAST_WORDS = 512
MOST_PADDING = 0.02
"""Share of its parameters that a model may grow by."""
VOCABULARY = ("vocab_size", "vocab", "n_vocab", "num_embeddings")
"""Settings of models that say how many words there are."""


@dataclass(frozen=True, kw_only=True)
class Faster(OptionChange):
    """A way with what a user types into a plain loop."""

    code: str = ""
    maths: str = EXACT
    axis: str = ""
    """What it changes: of one axis, one way at a time."""

    def beside(self, other: Faster) -> Faster:
        """Both, of different axes."""
        mine, theirs = self.options.get("overrides"), other.options.get("overrides")
        options = {**self.options, **other.options} | ({"overrides": {**mine, **theirs}} if mine and theirs else {})
        maths = max(self.maths, other.maths, key=(EXACT, BOUNDED, CHANGES).index)
        return Faster(
            options=options, change=f"{self.change}, {other.change}", costs="; ".join(filter(None, (self.costs, other.costs))),
            same_maths=self.same_maths and other.same_maths, code="\n".join(filter(None, (self.code, other.code))), maths=maths,
            axis=f"{self.axis}+{other.axis}",
        )  # fmt: skip

    @property
    def flag(self) -> str:
        """As it is typed."""
        sets = " ".join(f"--set {key}={value}" for key, value in (self.options.get("overrides") or {}).items())
        return " ".join(filter(None, (super().flag, sets)))


@dataclass(frozen=True, kw_only=True)
class SpeedRequest:
    """What was asked, as far as a way may change it."""

    recipe: Recipe
    cluster: Cluster
    micro_batch: int = 1
    resizable: bool = True
    """Whether the batch can be made larger."""
    settings: Sequence[str] = ()
    """Names of the model's own settings that can be changed."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Those that were."""
    devices: int = 1


def ways(asked: SpeedRequest, answer: Prediction) -> list[Faster]:
    """All that are legal here, except for larger micro-batches, which are tried one after another."""
    found = [*_padded(asked, answer), *_formats(asked), *_compiled(asked, answer), *_laid_out(asked, answer)]
    return [*found, *_optimizers(asked), *_recomputed(asked)]


def legal(asked: SpeedRequest, options: Mapping[str, Any]) -> bool:
    """Whether PyTorch runs these together: gradients that add up over replays of a recorded graph would be overwritten, and it refuses."""
    recorded = options.get("compile", asked.recipe.compile) == "graphs"
    return not (recorded and options.get("accumulate", asked.recipe.accumulate) > 1)


def batches(asked: SpeedRequest) -> Iterator[Faster]:
    """The same samples in fewer micro-batches, then more samples a step."""
    if not asked.resizable:
        return
    steps = asked.recipe.accumulate
    for times in TIMES:
        size = asked.micro_batch * times
        if steps % times == 0 and steps > 1:
            yield Faster(
                options={"micro_batch": size, "accumulate": steps // times}, change=f"micro-batches of {size} samples, {steps // times} a step",
                costs="more memory", code=f"batch_size = {size}, accumulate {steps // times}", axis="batch",
            )  # fmt: skip
        elif steps == 1:
            yield Faster(
                options={"micro_batch": size}, change=f"batches of {size} samples", costs="more memory; fewer, larger optimizer steps",
                same_maths=False, code=f"DataLoader(..., batch_size={size})", maths=CHANGES, axis="batch",
            )  # fmt: skip


def _padded(asked: SpeedRequest, answer: Prediction) -> Iterator[Faster]:
    """Sizes of large products that are no multiple of what tensor cores like. Whether the setting says this size is seen when it is
    predicted (`pads`)."""
    name = next((one for one in VOCABULARY if one in asked.settings), None)
    sizes = answer.model.get("unaligned") or {}
    for size in (int(one) for one in sizes):
        if name is not None and size >= LEAST_WORDS:
            padded = -(-size // ALIGNED) * ALIGNED
            yield Faster(
                options={"overrides": {**asked.overrides, name: padded}}, change=f"pad the vocabulary from {size:,} to {padded:,} words",
                costs="unused words", same_maths=False, code=f"{name} = {padded}  # {size} rounded up to a multiple of {ALIGNED}",
                maths=CHANGES, axis="vocabulary",
            )  # fmt: skip


def pads(before: Prediction, then: Prediction) -> bool:
    """Whether settings that changed made the model a little larger, and nothing else of it."""
    return before.parameters <= then.parameters <= before.parameters * (1 + MOST_PADDING)


def _formats(asked: SpeedRequest) -> Iterator[Faster]:
    known, own = asked.cluster.device.peak_flops_per_second, asked.recipe.precision
    if own == "fp32" and "tf32" in known:
        yield Faster(
            options={"precision": "tf32"}, change="products in TF32", costs="inputs of products rounded to 10 bits", same_maths=False,
            code='torch.set_float32_matmul_precision("high")', maths=BOUNDED, axis="format",
        )  # fmt: skip
    if own in ("fp32", "tf32"):
        for dtype, name in (("bfloat16", "bf16-mixed"), ("float16", "fp16-mixed")):
            if dtype in known and (dtype == "bfloat16" or "bfloat16" not in known):
                scaled = "" if dtype == "bfloat16" else ", with a GradScaler"
                yield Faster(
                    options={"precision": name}, change=f"autocast to {dtype}{scaled}", costs="products in 16 bits", same_maths=False,
                    code=f'with torch.autocast("{asked.cluster.device.torch_type}", torch.{dtype}): loss = ...', maths=BOUNDED, axis="format",
                )  # fmt: skip


def _compiled(asked: SpeedRequest, answer: Prediction) -> Iterator[Faster]:
    time = answer.time
    if asked.recipe.compile != "none" or time is None or not compiles(asked.cluster, time.breakdown, int(answer.model.get("breaks") or 0)):
        return
    yield Faster(
        options={"compile": "model"}, change="torch.compile", costs="minutes of compiling at first", same_maths=False,
        code="model = torch.compile(model)", maths=BOUNDED, axis="compile",
    )  # fmt: skip
    if time.waiting_for_host_seconds > HOST_BOUND * time.step_seconds and asked.devices == 1:
        yield Faster(
            options={"compile": "graphs"}, change="torch.compile with CUDA graphs", costs="minutes of compiling at first; fixed shapes",
            same_maths=False, code='model = torch.compile(model, mode="reduce-overhead")', maths=BOUNDED, axis="compile",
        )  # fmt: skip


def compiles(cluster: Cluster, breakdown: Mapping[str, float], breaks: int) -> bool:
    """Whether torch.compile is an offer: it leaves recurrent layers out, and where a model reads values again and again it gains little."""
    capability = cluster.device.compute_capability
    return cluster.device.backend == "cuda" and (capability is None or capability >= (7, 0)) and not breakdown.get("recurrent") and not breaks


def _laid_out(asked: SpeedRequest, answer: Prediction) -> Iterator[Faster]:
    convolutions = (answer.time.breakdown.get("convolution", 0.0) if answer.time is not None else 0.0) > 0
    if convolutions and not asked.recipe.channels_last and asked.devices == 1:
        yield Faster(
            options={"channels_last": True}, change="channels-last images and convolutions",
            code="model = model.to(memory_format=torch.channels_last); x = x.to(memory_format=torch.channels_last)", axis="layout",
        )  # fmt: skip


def _optimizers(asked: SpeedRequest) -> Iterator[Faster]:
    kind, _, variant = asked.recipe.optimizer.partition("-")
    if asked.recipe.mode == "train" and kind in ("adam", "adamw", "momentum") and variant != "fused":
        name = {"adam": "Adam", "adamw": "AdamW", "momentum": "SGD"}[kind]
        code = f"torch.optim.{name}(..., fused=True)"
        yield Faster(options={"optimizer": f"{kind}-fused"}, change="the fused optimizer", code=code, axis="optimizer")


def _recomputed(asked: SpeedRequest) -> Iterator[Faster]:
    weaker = {"host": ("full", "selective", "none"), "full": ("selective", "none"), "selective": ("none",)}.get(asked.recipe.recompute, ())
    for how in weaker if asked.recipe.mode == "train" else ():
        words = {"none": "keep all activations", "full": "keep inputs of blocks on the device"}.get(how, "recompute all but products and attention")
        yield Faster(options={"recompute": how}, change=words, costs="more memory", code="leave torch.utils.checkpoint out", axis="recompute")
