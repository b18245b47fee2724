"""A predicted serving configuration as the launch command of another engine, with the reason for each flag. Pure: no torch.

It is read from what `foretell serve MODEL --on HW --engine vllm --json` prints. A model that only foretell has is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from foretell.decode import json_of
from foretell.errors import UserError
from foretell.export.types import Exported
from foretell.plan.text import plain

SCRIPT = "serve.sh"
REMEDY = "write one with `foretell serve MODEL --on HW --engine vllm --load LOAD --json > serving.json`"


class Flag(NamedTuple):
    """One option of a command."""

    name: str
    value: str
    why: str


class ServingPlan(NamedTuple):
    """What of a forecast a launch command says."""

    model: str
    device: str
    engine: str
    tp: int
    weights: str
    running: int
    step_tokens: int
    memory_share: float
    longest: int
    pages: int
    page_tokens: int
    weights_bytes: int


def holds(path: Path) -> bool:
    """Whether a file is a forecast of serving and no plan."""
    try:
        data = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and isinstance(data.get("forecast"), dict) and "step_tokens" in data["forecast"]


def read(path: Path) -> ServingPlan:
    """The forecast of a file."""
    try:
        data = json_of(path.read_text(encoding="utf-8"))["forecast"]
        made = ServingPlan(**{name: _KINDS[name](data[name]) for name in ServingPlan._fields})
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is no forecast of another engine: {plain(str(error))[:120]}", REMEDY) from error
    if min(made.tp, made.running, made.step_tokens, made.pages, made.page_tokens) < 1 or not 0 < made.memory_share <= 1:
        raise UserError(f"{path} has counts below one", REMEDY)
    return made


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "model": str, "device": str, "engine": str, "weights": str, "memory_share": float,
    **dict.fromkeys(("tp", "running", "step_tokens", "longest", "pages", "page_tokens", "weights_bytes"), int),
}  # fmt: skip


def vllm(plan: ServingPlan) -> Exported:
    """`vllm serve`."""
    flags = [
        *_flags(plan, "--tensor-parallel-size", "--gpu-memory-utilization", "--max-num-seqs", "--max-model-len"),
        Flag("--max-num-batched-tokens", str(plan.step_tokens), "tokens that a step computes: more make the first token earlier and others later"),
    ]
    if plan.weights == "fp8":
        flags.append(Flag("--quantization", "fp8", "weights and products in 8 bits, as predicted"))
    elif plan.weights != "bf16":
        flags.append(Flag("--dtype", "auto", f"weights in {plan.weights}: name a checkpoint that is in this format"))
    return _written("vllm", f"vllm serve {_model(plan, 'vllm')}", flags, plan)


def sglang(plan: ServingPlan) -> Exported:
    """`python -m sglang.launch_server`."""
    flags = [
        *_flags(plan, "--tp", "--mem-fraction-static", "--max-running-requests", "--context-length"),
        Flag("--chunked-prefill-size", str(plan.step_tokens), "tokens of prompts that a step computes"),
    ]
    if plan.weights == "fp8":
        flags.append(Flag("--quantization", "fp8", "weights and products in 8 bits, as predicted"))
    return _written("sglang", f"python -m sglang.launch_server --model-path {_model(plan, 'sglang')}", flags, plan)


TOOLS: Mapping[str, Callable[[ServingPlan], Exported]] = {"vllm": vllm, "sglang": sglang}


def _flags(plan: ServingPlan, tp: str, share: str, running: str, longest: str) -> list[Flag]:
    weights, room = plan.weights_bytes / 2**30, plan.pages * plan.page_tokens
    found = [
        Flag(tp, str(plan.tp), f"{plan.tp} x {plan.device}: {weights:.1f} GiB of weights on each"),
        Flag(share, f"{plan.memory_share:g}", f"leaves pages for about {room:,} tokens beside the weights"),
        Flag(running, str(plan.running), "sequences at a time, as predicted"),
    ]
    if plan.longest:
        found.append(Flag(longest, str(plan.longest), "the longest request of the load: prompt and answer"))
    return found


def _model(plan: ServingPlan, tool: str) -> str:
    name = plan.model.removeprefix("hf:")
    if not plan.model.startswith("hf:") or ("/" not in name and not name.startswith(".")):
        problem = f"{tool} cannot load {plain(plan.model)}: it is no folder and no repository of Hugging Face"
        raise UserError(problem, "predict hf:FOLDER or hf:ORG/NAME, and export that")
    return shlex.quote(name)


def _written(tool: str, command: str, flags: list[Flag], plan: ServingPlan) -> Exported:
    lines = [f"# Written by `foretell plan export --to {tool}` for {plain(plan.model)} on {plan.tp} x {plain(plan.device)}."]
    lines += [f"# {flag.name} {flag.value}: {plain(flag.why)}" for flag in flags]
    words = " \\\n  ".join((command, *(f"{flag.name} {shlex.quote(flag.value)}" for flag in flags)))
    text = "\n".join(("#!/bin/sh", *lines, words, ""))
    other = [] if plan.engine == tool else [f"it was predicted for {plain(plan.engine)}, whose limits these are"]
    return Exported(files={SCRIPT: text}, command=f"sh {SCRIPT}", lost=(*other, "the load, the limits and what was predicted"))
