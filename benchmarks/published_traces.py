"""The traces that rows of published runs are priced from: short stacks of the zoo's models, shared by rows of equal shapes.

A row's model has so many equal layers that two short stacks tell what one more layer costs. What a rank of a tensor- or
context-parallel group computes is traced as the product traces it (`search.traces.split`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from published_rows import Run  # noqa: E402

from benchmarks.foreign.stacks import ALTERNATE, OPS, PRODUCTS_ALONE  # noqa: E402
from foretell.hardware.types import Device  # noqa: E402
from foretell.search.traces.child import answer  # noqa: E402
from foretell.trace.load.model import Source  # noqa: E402
from foretell.trace.recipe import Recipe  # noqa: E402
from foretell.trace.sandbox.child import request  # noqa: E402
from foretell.trace.store import cache as store  # noqa: E402
from foretell.trace.store import traces as stored  # noqa: E402
from foretell.trace.types import Trace  # noqa: E402

DEPTHS = (2, 4)
"""Layers of the short stacks: two where blocks are gathered one by one beside compute, else one, whose last block stands for all."""
VOCABULARY_MULTIPLE, NARROW_HEAD = 128, 64
MOST_AT_HAND = 80
"""Traces in memory; others are read again from the cache on disk."""


class Untraceable(Exception):
    """Why the model of a row cannot be traced."""


def depths_of(run: Run) -> tuple[int, ...]:
    by_unit = run.shard == "zero3" or (run.shard == "zero2" and run.stack.by_unit)
    return DEPTHS if by_unit and run.pp == 1 and run.dp * run.cp > 1 else DEPTHS[:1]


def mode_of(run: Run) -> str:
    """Recipe's recompute that a row's selective or full recomputation starts from."""
    if run.recompute == "selective":
        return "selective" if run.stack.selective in (OPS, ALTERNATE, PRODUCTS_ALONE) else "none"
    return run.recompute


def asked(run: Run, device: Device, depth: int, *, mode: str | None = None) -> dict[str, Any]:
    """One request: nothing in it that the trace does not depend on."""
    half = "bfloat16" in device.peak_flops_per_second
    alone = run.stack.native and (run.world == 1 or (run.shard == "none" and run.world == run.dp))  # autocast; DDP has it too
    precision = ("bf16-autocast" if half else "fp16-autocast") if alone else "fsdp-bf16" if half else "fsdp-fp16"
    recipe = Recipe(
        optimizer=run.stack.optimizer, precision=precision, recompute=mode_of(run) if mode is None else mode, clip=1.0,
    )  # fmt: skip
    source = Source(**model_of(run, depth), micro_batch=run.micro)
    capability = tuple(device.compute_capability or (9, 0))
    found = request(source, recipe, capability, {})  # type: ignore[arg-type]
    if run.tp > 1 and not run.experts:
        found["tp"] = {"ranks": run.tp, "sequence": run.sequence_parallel, "loss": True, "rules": {}}
    if run.cp > 1 and not run.experts:
        found["cp"] = run.cp
    return found


def model_of(run: Run, depth: int) -> dict[str, Any]:
    """The zoo's family with a row's dimensions, `depth` layers deep."""
    step = VOCABULARY_MULTIPLE * run.tp
    vocab = max(step, -(-run.vocab // step) * step)
    seq = run.seq
    heads, kv_heads = heads_of(run)
    common = {"layers": depth, "dim": run.hidden, "heads": heads, "vocab_size": vocab}
    if run.experts:  # ranks that share positions or layers are taken to share the tokens
        seq = max(1, seq // (run.tp * run.cp))
        local = max(run.experts // run.ep, run.topk)
        over = {**common, "context": seq, "kv_heads": kv_heads, "ffn": run.ffn, "experts": local, "top_k": run.topk,
                "capacity_factor": 1.0}  # fmt: skip
        return {"model": "mixtral-8x7b", "overrides": over, "seq": seq}
    if run.gated:
        over = {**common, "context": seq, "kv_heads": kv_heads, "ffn": run.ffn}
        return {"model": "llama3-8b", "overrides": over, "seq": seq}
    over = {**common, "context": seq, "dropout": run.stack.dropout, "fused_attention": not run.stack.spelled}
    return {"model": "gpt2", "overrides": over, "seq": seq}


def heads_of(run: Run) -> tuple[int, int]:
    """Heads whose width is the hidden size over their number; where a model's is not, as many of 64 channels as fit."""
    if run.hidden % run.heads == 0 and run.hidden // run.heads % 2 == 0:
        return run.heads, run.kv_heads
    heads = max(1, run.hidden // NARROW_HEAD)
    return heads, max(count for count in range(1, min(run.kv_heads, heads) + 1) if heads % count == 0)


class Traces:
    """Traces by their request: from the cache on disk, else made here."""

    def __init__(self, told: Callable[[str], None] = lambda _: None) -> None:
        self.known: dict[str, Trace] = {}
        self.made, self.failed, self.used = 0, dict[str, str](), set[str]()
        self.told = told

    def of(self, wanted: dict[str, Any]) -> Trace:
        key = store.key_of({"trace": wanted})
        if key in self.failed:
            raise Untraceable(self.failed[key])
        if key in self.known:
            self.known[key] = self.known.pop(key)  # the latest comes last
            return self.known[key]
        found = stored.known(wanted)
        self.known[key] = found[0] if found is not None else self._made(key, wanted)
        if len(self.known) > MOST_AT_HAND:
            self.known.pop(next(iter(self.known)))
        self.used.add(key)
        return self.known[key]

    def _made(self, key: str, wanted: dict[str, Any]) -> Trace:
        reply = answer(wanted)
        if "error" in reply:
            self.failed[key] = str(reply["error"])[:200]
            raise Untraceable(self.failed[key])
        text = reply.pop("text")
        stored.keep(wanted, text, reply)
        self.made += 1
        self.told(f"traced {self.made}")
        return stored.parsed({"trace": text, **{name: reply[name] for name in ("files", "notes") if name in reply}})[0]
