"""From a plan and settings to a model with real weights and the samples it learns from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from foretell.errors import UserError
from foretell.plan.recipe import refuse_other_model, source_of
from foretell.plan.types import Plan
from foretell.runtime.data.samples import Example, Samples, own_samples
from foretell.runtime.data.text import Windows, read_corpus, text_form
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.train.folder import RunSettings
from foretell.runtime.train.rng import seed_all
from foretell.trace.load import model as load
from foretell.trace.load import userfile
from foretell.trace.record.step import Batch, Workload


def build(plan: Plan, seed: int) -> Workload:
    """The plan's model with real weights, the same on every rank; one it was not made for is refused."""
    seed_all(seed)
    workload = load.load(source_of(plan))
    shapes = {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in workload.model.named_parameters()}
    refuse_other_model(plan, shapes)
    return workload


def samples_of(plan: Plan, settings: RunSettings, workload: Workload) -> tuple[Samples, Samples | None]:
    """What to learn from, and what to evaluate on if there is any."""
    name = str(plan.model["model"])
    own = settings.data or name.partition(":")[0]
    if own.endswith(".py"):
        if not Path(own).is_file():
            raise UserError(f"there is no file {own}", "give --data a folder of text, or a FILE.py with data(split)")
        found = userfile.function(own, "data")
        if found is not None:
            return _own(found, plan, settings, f"{own}:data")
        if settings.data:
            raise UserError(f"{own} has no function data", "define data(split) in it: anything with a length and an index")
    if settings.data is None:
        return Example(workload.batch, plan.micro_batch), None
    seq, form = text_form(workload.model, workload.batch, name)
    corpus = read_corpus(Path(settings.data))
    return Windows(corpus, seq, form), Windows(corpus, seq, form, split="eval")


def _own(data: Callable[..., Any], plan: Plan, settings: RunSettings, owner: str) -> tuple[Samples, Samples | None]:
    known = {"micro_batch": plan.micro_batch, "seq": plan.model.get("seq"), "image": plan.model.get("image"), "seed": settings.seed}

    def of(split: str) -> Samples | None:
        return own_samples(lambda: userfile.call(data, {"split": split, **known}, owner), seed=settings.seed, owner=owner)

    train_samples = of("train")
    if train_samples is None:
        raise UserError(f"{owner} returned None for the split 'train'", "return the samples to learn from")
    return train_samples, of("eval") if userfile.takes(data, "split") else None


def applies(plan: Plan, ranks: Ranks) -> bool:
    """Whether the plan's predictions are of this kind of device."""
    return plan.hardware.casefold().startswith("cpu") == (ranks.device.type == "cpu") or plan.hardware.startswith("auto")


def count_of(batch: Batch, micro_batch: int) -> tuple[str, int]:
    """What a sample counts as: its tokens where the batch has a table of them, else one sample."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
    for value in values:
        whole = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)
        if whole and value.dim() == 2 and value.shape[0] == micro_batch:
            return "tokens", int(value.shape[1])
    return "samples", 1
