"""Scripts of several ranks, each followed as it is: one rank's bytes, what differs between ranks, and what is said of odd ones."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from foretell.cli import main
from foretell.errors import ModelError, UserError
from foretell.lower.fsdp.sharded import shard
from foretell.lower.spread import spread
from foretell.simulate.memory.replay import peak_live
from foretell.trace import types
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox import server
from foretell.trace.sandbox.child import request as request_file
from foretell.trace.sandbox.child import trace_in_child
from foretell.trace.script.child import follow_in_child, request
from foretell.trace.script.ranks import environment
from foretell.trace.script.several import follow_ranks
from foretell.trace.script.words import over, parse
from foretell.trace.store.file import loads
from foretell.trace.types import Trace
from tests import forks

DATA = Path(__file__).resolve().parents[1] / "data"
SCRIPTS = DATA / "scripts"
COMMANDS = {
    "ddp_gpt": "torchrun --nproc_per_node=8 ddp_gpt.py --accumulate 4",
    "ddp_images": "torchrun --standalone --nproc_per_node=8 ddp_images.py",
    "ddp_bert": "python -m torch.distributed.run --nnodes 2 --nproc_per_node 4 ddp_bert.py",
    "ddp_forecast": "torchrun --nproc_per_node 8 ddp_forecast.py --window 192",
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
    "ddp_forecast": {"precision": "fp32", "optimizer": "adamw", "clip": 0.5},
    "ddp_spawn": {"precision": "fp32", "optimizer": "adam"},
    "fsdp_llama": {"precision": "fsdp-bf16", "clip": 1.0, "shards": 8},
    "fsdp_vit": {"precision": "bf16-autocast", "optimizer": "adamw", "shards": 4},
    "fsdp_gpt2": {"precision": "fsdp-bf16", "optimizer": "adamw", "accumulate": 2, "clip": 1.0, "shards": 8},
    "fsdp_ends": {"precision": "fsdp-bf16", "optimizer": "momentum", "clip": 1.0, "shards": 8},
}  # fmt: skip
"""What each does, as its source says."""
NODES = {"ddp_bert": (2, 4), "fsdp_vit": (2, 4)}
FURTHER = {
    "fsdp_ends": "shards its ends apart, as a test of test_sharded.py does",
    **dict.fromkeys(("ddp_bert", "ddp_images", "ddp_forecast"), "another model under DDP, as ddp_gpt"),
    **dict.fromkeys(("fsdp_gpt2", "fsdp_vit"), "another model under FSDP2, as fsdp_llama"),
}
"""Why a script is slow: what is like it."""


def quick(kind: str) -> list[Any]:
    """Scripts of a kind, those that are like another marked."""
    return [pytest.param(name, marks=pytest.mark.slow(reason=FURTHER[name])) if name in FURTHER else name for name in FOUND if name.startswith(kind)]


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


@pytest.mark.parametrize("name", quick("ddp"))
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


@pytest.mark.parametrize("name", quick("fsdp"))
def test_a_rank_of_fsdp2_needs_what_the_file_that_shards_the_same_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = followed(name, monkeypatch)
    recipe = Recipe.from_json(trace.meta["recipe"])  # type: ignore[arg-type]
    assert recipe == Recipe(**FOUND[name])
    rank, other = spread(trace, trace.meta["spread"]), HOW[name](as_file(name, recipe))  # type: ignore[arg-type]
    hand = _by_hand(name, recipe) if name != "fsdp_gpt2" else {}
    past = hand[types.PARAMETER] if name == "fsdp_ends" else 0  # the mean of its past is sharded as the parameters are
    assert abs(most(rank) / (most(other) + past) - 1) < 0.001
    assert not hand or _kept(rank) == hand


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


# --- ranks that differ, and odd scripts ------------------------------------------------------------------------------------


HEAD = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("nccl")
rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(local)
"""
LOOP = """
model = DDP(net, device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(8, 64).to(local)).sum().backward()
"""


def fit(words: str, on: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.chdir(folder)
    return main(["fit", "--on", on, *more, "--", *words.split()])


LEFT = """
import glob
held = {os.readlink(one) for one in glob.glob("/proc/self/fd/*") if os.path.islink(one)}
listening = {f"socket:[{row.split()[9]}]" for row in open("/proc/net/tcp").readlines()[1:] if row.split()[3] == "0A"}
assert not held & listening, "a port is open"
"""


@pytest.mark.slow(reason="ranks that wait until they are ended; other scripts that cannot be followed are told with their line below")
def test_a_step_on_rank_0_alone_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing is left: no process, no port."""
    text = HEAD + LEFT + LOOP + "    if rank == 0:\n        optimizer.step()\n"
    (tmp_path / "train.py").write_text(text)
    with forks.own_server():
        assert fit("torchrun --nproc-per-node 4 train.py", "H100:4", tmp_path, monkeypatch) == 2
        assert not _children(server._known[0].process.pid)
    said = capsys.readouterr().err.splitlines()[-1]
    line = text.splitlines().index("        optimizer.step()") + 1
    assert said.startswith("error: rank 3: train.py ended before its first step") and f"rank 0 steps at train.py:{line}" in said


def _children(parent: int) -> list[str]:
    """Processes that a process started and that are still there."""
    found = []
    for one in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, owner = one.read_text().rpartition(")")[2].split()[:2]
            found += [one.parent.name] if int(owner) == parent and state != "Z" else []
    return found


def test_the_rank_that_needs_more_is_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It raises in its second step, which is after the first."""
    body = LOOP.replace("model = DDP", "kept = nn.Linear(4096, 4096).to(local) if rank else None\nmodel = DDP")
    late = "    optimizer.step()\n    assert step == 0 and not optimizer.state\n    raise ValueError(step)\n"
    (tmp_path / "train.py").write_text(HEAD + body + late)
    assert fit("torchrun --nproc-per-node 4 train.py", "H100:4", tmp_path, monkeypatch, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["memory"]["allocated_bytes"] > 64 * 2**20
    assert any(note.startswith("rank 0 needs") and "less than rank 3" in note for note in answer["assumptions"])


def test_what_another_rank_sends_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "\nsizes = [64] if rank == 0 else [None]\ndist.broadcast_object_list(sizes, src=0)\nnet = nn.Linear(sizes[0] + 0, 64).to(local)\n"
    (tmp_path / "train.py").write_text(HEAD + body + LOOP + "    optimizer.step()\n")
    monkeypatch.chdir(tmp_path)
    script = over(parse(["torchrun", "--nproc-per-node", "4", "train.py"]), 1, 4, "H100")
    ((_, reply),) = follow_ranks(script, (9, 0), {}, False, devices=4, name="H100", time_limit=240)
    assert any("rank 3 is not followed" in note and "train.py:10" in note for note in reply["notes"])


REFUSED = {
    "FSDP(net)": "first edition",
    "DDP(net).register_comm_hook(None, print)": "communication hook",
    "DDP(net, mixed_precision=1)": "mixed_precision",
    "DDP(nn.ReLU())": "without a parameter that learns",
    "fully_shard(net, offload_policy=CPUOffloadPolicy())": "CPUOffloadPolicy",
    "fully_shard(net, mesh=square['dp'])": "a mesh of 2 of 4 ranks",
    "parallelize_module(net, square['tp'], {})": "tensor parallelism",
    "init_device_mesh('cuda', (8,))": "8 ranks, and 4 are launched",
    "fully_shard(bound)": "after the optimizer was made",
    "fully_shard(net.to(torch.float16), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))": "keep parameters in float32",
    "fully_shard(nn.Linear(4, 4)).set_requires_gradient_sync(False)": "whole gradients",
    "fully_shard(nn.Linear(4, 4)).set_modules_to_forward_prefetch([])": "held at once",
}  # fmt: skip
"""What a script may ask for → what is said of it."""


def test_what_is_not_followed_is_refused_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one script, which catches each."""
    imports = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel as FSDP, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
square = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
assert square["tp"].size() == 2 and square.get_local_rank("dp") == 0 and dist.get_backend() == "nccl"
bound = nn.Linear(4, 4)
optimizer = torch.optim.SGD(bound.parameters())
said = []
def tried(what):
    try:
        exec(compile(what, __file__, "exec"), globals())
        said.append("nothing")
    except Exception as error:
        said.append(f"{error.problem}; {error.remedy}" if hasattr(error, "problem") else repr(error))
"""
    calls = "\n".join(f"tried({what!r})" for what in REFUSED)
    (tmp_path / "train.py").write_text(HEAD + imports + calls + "\nraise ValueError('@@'.join(said))\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        follow_in_child(request(over(parse(["torchrun", "--nproc-per-node", "4", "train.py"]), 1, 4, "H100"), (9, 0), {}, False), time_limit=240)
    said = caught.value.problem.split("ValueError: ")[1].split("@@")
    for (what, wanted), found in zip(REFUSED.items(), said, strict=True):
        assert wanted in found and "train.py:" in found, (what, found)


ALONE = HEAD.replace('("nccl")', '("nccl", rank=0, world_size=1)').replace('int(os.environ["LOCAL_RANK"])', "0")
ODD = {
    "no backward": ("torchrun --nproc-per-node 2 train.py", HEAD + "net(torch.zeros(2, 64).to(local))\n", "ended without backward"),
    "no launcher": ("python train.py", HEAD, "train.py:5: init_process_group needs RANK"),
    "own variables": ("python train.py", "import os\nrank = int(os.environ['RANK'])\n", "KeyError: 'RANK' (train.py:2"),
    "one process": ("python train.py", ALONE + LOOP + "    optimizer.step()\n", "runs as one process"),
    "never sums": ("torchrun --nproc-per-node 2 train.py", HEAD + LOOP.replace("    optimizer.zero", "    model.require_backward_grad_sync = False\n"
                   "    optimizer.zero") + "    optimizer.step()\n", "the last must sum gradients"),
    "parts alone": ("torchrun --nproc-per-node 2 train.py", HEAD + "from torch.distributed.fsdp import fully_shard\nfully_shard(net[0])\n"
                    "fully_shard(net[2])\noptimizer = torch.optim.SGD(net.parameters())\nnet(torch.zeros(2, 64).to(local)).sum().backward()\n"
                    "optimizer.step()\n", "2 modules side by side (train.py:9, train.py:10)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_odd_scripts_end_with_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words, text, wanted = ODD[kind]
    (tmp_path / "train.py").write_text(text)
    assert fit(words, "H100:2", tmp_path, monkeypatch) == 2
    said = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert wanted in said and "; try: " in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "nodes", "each", "wanted"),
    [
        ("torchrun --nproc-per-node 8 train.py", 1, 4, "starts 1 x 8 processes, and H100 is there 1 x 4 times"),
        ("torchrun --nnodes 2 --nproc-per-node 4 train.py", 1, 8, "other nodes than those"),
        ("accelerate launch --num_processes 3 --num_machines 2 train.py", 2, 2, "3 processes on 2 nodes"),
        ("accelerate launch --use_fsdp --num_processes 2 train.py", 1, 2, "FSDP is not followed yet"),
    ],
)  # fmt: skip
def test_more_ranks_than_devices_are_refused(words: str, nodes: int, each: int, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(UserError) as caught:
        over(parse(words.split()), nodes, each, "H100")
    assert wanted in caught.value.problem


def test_what_launchers_say_to_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    script = over(parse(["torchrun", "--nnodes", "2", "--nproc-per-node", "gpu", "train.py"]), 2, 4, "H100")
    told = environment(script, 6)
    assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"], told["GROUP_RANK"]) == ("6", "2", "8", "1")
    script = parse(["accelerate", "launch", "--num_processes", "2", "--mixed_precision=bf16", "train.py"])
    assert environment(script, 0)["ACCELERATE_MIXED_PRECISION"] == "bf16" and script.ranks == 2
    assert environment(parse(["python", "train.py"]), 0) == {}
