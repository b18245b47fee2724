"""Scripts of several ranks, each followed as it is: one rank's bytes, what differs between ranks, and what is said of odd ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from foretell.lower.fsdp.sharded import shard
from foretell.lower.spread import spread
from foretell.simulate.memory.replay import peak_live
from foretell.trace import types
from foretell.trace.child import request as request_file
from foretell.trace.child import trace_in_child
from foretell.trace.file import loads
from foretell.trace.load import Source
from foretell.trace.recipe import Recipe
from foretell.trace.script.child import follow_in_child, request
from foretell.trace.script.words import over, parse
from foretell.trace.types import Trace

DATA = Path(__file__).resolve().parents[1] / "data"
SCRIPTS = DATA / "scripts"
COMMANDS = {
    "ddp_gpt": "torchrun --nproc_per_node=8 ddp_gpt.py --accumulate 4",
    "ddp_images": "torchrun --standalone --nproc_per_node=8 ddp_images.py",
    "ddp_bert": "python -m torch.distributed.run --nnodes 2 --nproc_per_node 4 ddp_bert.py",
    "ddp_spawn": "python ddp_spawn.py --gpus 8",
    "fsdp_llama": "torchrun --nproc-per-node 8 fsdp_llama.py",
    "fsdp_vit": "torchrun --nnodes 2 --nproc-per-node 4 fsdp_vit.py",
    "fsdp_gpt2": "torchrun --nproc_per_node=8 fsdp_gpt2.py",
    "fsdp_ends": "torchrun --nproc-per-node gpu fsdp_ends.py",
}  # fmt: skip
FOUND = {
    "ddp_gpt": {"precision": "fp16-autocast", "accumulate": 4, "clip": 1.0},
    "ddp_images": {"precision": "bf16-autocast", "optimizer": "momentum"},
    "ddp_bert": {"precision": "bf16-autocast", "optimizer": "adamw", "accumulate": 2, "clip": 1.0},
    "ddp_spawn": {"precision": "fp32", "optimizer": "adam"},
    "fsdp_llama": {"precision": "fsdp-bf16", "clip": 1.0, "shards": 8},
    "fsdp_vit": {"precision": "bf16-autocast", "optimizer": "adamw", "shards": 4},
    "fsdp_gpt2": {"precision": "fsdp-bf16", "optimizer": "adamw", "accumulate": 2, "clip": 1.0, "shards": 8},
    "fsdp_ends": {"precision": "fsdp-bf16", "optimizer": "momentum", "clip": 1.0, "shards": 8},
}  # fmt: skip
"""What each does, as its source says."""
NODES = {"ddp_bert": (2, 4), "fsdp_vit": (2, 4)}


def followed(name: str, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> tuple[Trace, dict[str, Any]]:
    monkeypatch.chdir(SCRIPTS)
    script = over(parse(COMMANDS[name].split()), *NODES.get(name, (1, 8)), "H100")
    text, reply = follow_in_child(request(script, (9, 0), {}, False, rank), time_limit=240)
    assert reply["world"] == 8
    return loads(text), reply


def as_file(name: str, recipe: Recipe) -> Trace:
    """The file's function makes another trace, of the same recipe; recomputation of `ddp_spawn` is in the model itself."""
    again = "full" if name == "fsdp_gpt2" else "none"
    asked = replace(recipe, recompute=again, shards=min(2, recipe.shards))
    text, _ = trace_in_child(request_file(Source(model=f"{DATA / 'scripts_as_files.py'}:{name}"), asked, (9, 0), {}))
    return loads(text)


def most(trace: Trace) -> int:
    return peak_live(trace, tuple(trace.schedule))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith("ddp")])
def test_a_rank_of_ddp_needs_its_step_and_its_buckets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = followed(name, monkeypatch)
    recipe = Recipe.from_json(trace.meta["recipe"])  # type: ignore[arg-type]
    assert recipe == Recipe(**FOUND[name])
    alone = as_file(name, recipe)
    told: Any = trace.meta["spread"]
    trained = 4 * int(trace.meta["trainable"])  # type: ignore[call-overload]
    assert told["kind"] == "ddp" and told["how"]["nbytes"] == trained
    rank = spread(trace, told)
    if name == "ddp_spawn":  # views: a gradient is in its bucket, and for a while beside it
        assert abs(most(rank) / most(spread(alone, told)) - 1) < 0.001
        assert most(rank) < most(alone) + trained / 4
    else:  # whole buckets beside all gradients, as two real ranks have them (cpu_dist/test_ddp_bytes.py)
        assert abs(most(rank) / (most(alone) + trained) - 1) < 0.001
    sums = [op for part, times in rank.schedule["steady_step"] for op in rank.programs[part].ops * times if op.name == "foretell.all_reduce"]
    assert sum(op.bytes_read for op in sums if "axis:dp_replicate" in op.attrs) == trained


HOW: Mapping[str, Callable[[Trace], Trace]] = {
    "fsdp_llama": lambda trace: shard(trace, 8, reduce="float32"),
    "fsdp_vit": lambda trace: shard(trace, 4, replicate=2),
    "fsdp_gpt2": lambda trace: shard(trace, 8, reduce="float32"),
    "fsdp_ends": lambda trace: spread(trace, {"kind": "fsdp", "world": 8, "shards": 8, "replicate": 1, "how": ENDS}),
}  # fmt: skip
"""What each does over its ranks, as its source says."""
ENDS = {
    "units": [["embed"], ["layers.0"], ["layers.1"], ["layers.2"], ["norm", "head"]], "reshard": {"layers.2": False, "norm": False},
    "reduce": "float32", "left": [],
}  # fmt: skip


@pytest.mark.parametrize("name", HOW)
def test_a_rank_of_fsdp2_needs_what_the_file_that_shards_the_same_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = followed(name, monkeypatch)
    recipe = Recipe.from_json(trace.meta["recipe"])  # type: ignore[arg-type]
    assert recipe == Recipe(**FOUND[name])
    rank, other = spread(trace, trace.meta["spread"]), HOW[name](as_file(name, recipe))  # type: ignore[arg-type]
    assert abs(most(rank) / most(other) - 1) < 0.001
    if name != "fsdp_gpt2":
        assert _kept(rank) == _by_hand(name, recipe)


def _kept(trace: Trace) -> dict[str, int]:
    """Bytes that stay, by what they are for."""
    held = dict.fromkeys((types.PARAMETER, types.OPTIMIZER), 0)
    for storage in trace.storages.values():
        if storage.role in held and not storage.host and storage.nbytes > 4:
            held[storage.role] += storage.nbytes
    return held


def _by_hand(name: str, recipe: Recipe) -> dict[str, int]:
    """Rows of each parameter that the first rank has, in fp32, and as many again for each moment."""
    monkey = sys.path
    sys.path = [str(SCRIPTS), *monkey]
    try:
        kind = importlib.import_module("accelerate_vit" if name == "fsdp_vit" else "fsdp_llama")
    finally:
        sys.path = monkey
    model: nn.Module = kind.ViT() if name == "fsdp_vit" else kind.Llama(depth=3 if name == "fsdp_ends" else 4)
    shards = sum(4 * -(-one.shape[0] // recipe.shards) * prod(one.shape[1:]) for one in model.parameters())
    return {types.PARAMETER: shards, types.OPTIMIZER: shards * (1 if recipe.optimizer == "momentum" else 2)}
