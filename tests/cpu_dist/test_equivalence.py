"""Every way to run a model computes what one process computes: losses of three steps, gradients of the first.

The reference is a plain loop in fp32 in one process, on the same global batch. fp32 cases are held to 1e-4; what bf16
is held to, and why, is said in foretell/runtime/check/verify.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretell.plan.types import Mesh, Pipeline, Plan, Residency, Split
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.runtime.process.pool import PoolWorld
from foretell.trace.load.model import Source
from tests.cpu_dist.beside_one import STEPS

TEXT = {"layers": 4, "dim": 32, "heads": 4, "vocab_size": 64, "context": 16}
LLAMA = {**TEXT, "kv_heads": 2, "ffn": 64}
SHORT = {"layers": 2}
QWEN = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64,
}  # fmt: skip
MODELS = {
    "gpt": Source(model="gpt-tiny", overrides=TEXT, micro_batch=2),
    "short gpt": Source(model="gpt-tiny", overrides={**TEXT, **SHORT}, micro_batch=2),
    "llama": Source(model="llama-tiny", overrides=LLAMA, micro_batch=2),
    "short llama": Source(model="llama-tiny", overrides={**LLAMA, **SHORT}, micro_batch=2),
    "hf": Source(model="hf:qwen2", overrides=QWEN, micro_batch=2, seq=16),
    "vit": Source(model="vit-tiny", overrides={"depth": 3, "dim": 32, "heads": 4, "image": 16}, micro_batch=2),
    "unet": Source(model="unet-tiny", image=16, micro_batch=2),
    "ssm": Source(model="ssm-tiny", overrides={"layers": 2, "dim": 16, "state": 4, "vocab_size": 64}, seq=8, micro_batch=2),
}
BLOCKS = {"hf": "model.layers"}
FULL, SELECTIVE = Residency(mode="recompute"), Residency(mode="selective")
BOTH = {"accumulate": 2, "clip": 0.1}
HOST = {"blocks.*": "host"}
OWN = {"rms_norm": "foretell"}


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    mesh: Mesh
    more: dict[str, Any] = field(default_factory=dict)
    slow: str = ""
    """Why `make test` leaves it out, if it does: what it runs instead."""

    @property
    def plan(self) -> Plan:
        usual = {"model": {}, "hardware": "auto", "micro_batch": 2, "precision": "fp32", "clip": None}
        given = dict(self.more)
        place = BLOCKS.get(self.model, "blocks")
        if "recompute" in given:
            given["blocks"] = {f"{place}.{key}": value for key, value in given.pop("recompute").items()}
        if "schedule" in given:
            cuts = tuple(f"{place}.{number}" for number in given.pop("cuts", (2,)))
            given["pipeline"] = Pipeline(schedule=given.pop("schedule"), cuts=cuts)
        return Plan(**{**usual, **given}, mesh=self.mesh)


def case(name: str, model: str, mesh: Mesh = Mesh(), slow: str = "", **more: Any) -> Case:  # noqa: B008
    return Case(name, model, mesh, more, slow)


CASES = [
    # data
    case("shards kept by two ranks", "short gpt", Mesh(dp_shard=4), clip=0.1, reshard=2),
    case("hybrid", "short llama", Mesh(dp_replicate=2, dp_shard=2), **BOTH, recompute={"*": SELECTIVE}, states=HOST, kernels=OWN),
    case("compiled replicas", "gpt", Mesh(dp_replicate=2), compile="blocks", slow="compiled with tensor below"),
    case("compiled shards", "short llama", Mesh(dp_shard=2), **BOTH, compile="blocks", recompute={"0": FULL}, states=HOST, kernels=OWN),
    case("unet", "unet", Mesh(dp_shard=2), **BOTH, optimizer="momentum"),
    case("ssm", "ssm", Mesh(dp_shard=3), accumulate=2, reshard=False, precision="bf16-mixed", states=HOST),
    # the loss in chunks, 32 tokens in pieces of 11, 11 and 10
    case("chunks, shards", "short gpt", Mesh(dp_shard=4), **BOTH, recompute={"*": FULL}, loss_chunks=3),
    case("chunks, hybrid, mixed", "short llama", Mesh(dp_replicate=2, dp_shard=2), precision="bf16-mixed", loss_chunks=3,
         slow="chunks are with shards, with replicas and with bf16 beside it"),
    case("chunks, compiled, bf16", "short gpt", Mesh(), precision="bf16", accumulate=2, compile="blocks", loss_chunks=3),
    case("chunks, hf, replicas", "hf", Mesh(dp_replicate=2), accumulate=2, loss_chunks=3, recompute={"*": SELECTIVE}, kernels=OWN),
    # tensor
    case("tensor", "short gpt", Mesh(tp=4), clip=0.1, slow="two ranks of it with replicas, shards and a pipeline below"),
    case("tensor, shards", "gpt", Mesh(dp_shard=2, tp=2), **BOTH, recompute={"*": FULL}, slow="with a pipeline below"),
    case("tensor, replicas, compiled", "short gpt", Mesh(dp_replicate=2, tp=2), split=Split(sequence=False), compile="blocks"),
    case("llama, tensor, shards", "llama", Mesh(dp_shard=2, tp=2), clip=0.1, slow="with a pipeline below"),
    case("vit, tensor, hybrid", "vit", Mesh(dp_replicate=2, dp_shard=2, tp=2), clip=0.1, slow="each two of the three are elsewhere"),
    case("hf, tensor, shards", "hf", Mesh(dp_shard=2, tp=2), clip=0.1, slow="split models of hf are in test_tensor.py"),
    # pipeline
    case("pipeline", "gpt", Mesh(pp=2), schedule="1f1b", accumulate=4, clip=0.1),
    case("pipeline, replicas", "llama", Mesh(pp=2, dp_replicate=2), schedule="zero-bubble-v", cuts=(1, 2, 3), accumulate=4, clip=0.1, reshard=False,
         kernels=OWN),
    case("pipeline, compiled, shards", "short gpt", Mesh(pp=2, dp_shard=2), schedule="1f1b", cuts=(1,), **BOTH, compile="blocks"),
    case("hf, pipeline, shards", "hf", Mesh(pp=2, dp_shard=2), schedule="gpipe", cuts=(1,), **BOTH, recompute={"*": FULL}),
    case("vit, uneven pipeline", "vit", Mesh(pp=2), schedule="1f1b", cuts=(2,), accumulate=3, recompute={"0-1": SELECTIVE}),
    # three at once
    case("tensor, pipeline", "llama", Mesh(pp=2, tp=2), schedule="interleaved-1f1b", cuts=(1, 2, 3), accumulate=4, clip=0.1, slow="with shards"),
    case("tensor, pipeline, shards", "short llama", Mesh(pp=2, dp_shard=2, tp=2), schedule="1f1b", cuts=(1,), **BOTH, recompute={"*": FULL}),
    case("all four on sixteen", "gpt", Mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2), schedule="1f1b", **BOTH, recompute={"*": SELECTIVE},
         slow="each two of the four are elsewhere"),
    # bf16
    case("bf16-mixed, one rank, compiled", "short gpt", Mesh(), precision="bf16-mixed", compile="model", accumulate=2),
    case("bf16-mixed, tensor, shards", "short llama", Mesh(dp_shard=2, tp=2), precision="bf16-mixed", clip=0.1, recompute={"*": FULL}),
    case("bf16-mixed, tensor, pipeline", "gpt", Mesh(pp=2, tp=2), schedule="1f1b", precision="bf16-mixed", accumulate=2,
         slow="each of the two is with bf16 elsewhere"),
    case("bf16, pipeline, replicas", "short llama", Mesh(pp=2, dp_replicate=2), schedule="1f1b", cuts=(1,), precision="bf16", kernels=OWN, **BOTH),
]  # fmt: skip


def test_the_cases_are_many_and_no_name_is_twice() -> None:
    """That every pair of axes is among those that `make test` runs is held by test_axes.py."""
    assert len(CASES) >= 24 and len({case.name for case in CASES}) == len(CASES)
    assert {case.model for case in CASES if not case.slow} == set(MODELS)
    worlds = sorted(case.plan.mesh.world for case in CASES)
    assert worlds[-1] == 16 and worlds[-2] == 8


class Sums(TorchDispatchMode):
    """Counts all-reduces of more than a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allreduce" in str(func):
            self.number += any(leaf.numel() > 2 for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def count_sums(rank: int, world: int, plan: Plan) -> int:
    job = apply(verify.build(MODELS["gpt"]), plan, start(plan, device="cpu"))
    with Sums() as sums:
        job.backward(verify.batches(MODELS["gpt"], plan.accumulate))
    return sums.number


def test_replicas_sum_their_gradients_once_a_step(ranks: Callable[[int], PoolWorld]) -> None:
    """Four blocks and the root, however many micro-batches there are."""
    plan = case("", "gpt", Mesh(dp_replicate=2), accumulate=3).plan
    assert ranks(2).run(count_sums, plan) == [5, 5]


@pytest.fixture(scope="module")
def reference(ranks: Callable[[int], PoolWorld]) -> Callable[[Case], verify.VerifyRun]:
    """One plain run for every model, number of micro-batches, limit and optimizer, in a process of one thread."""
    known: dict[Any, verify.VerifyRun] = {}

    def of(case: Case) -> verify.VerifyRun:
        plan = case.plan
        key = (case.model, plan.mesh.data * plan.accumulate, plan.clip, plan.optimizer)
        if key not in known:
            known[key] = ranks(1).run(verify.reference_rank, MODELS[case.model], plan, STEPS)[0]
        return known[key]

    return of


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.slow(reason=case.slow) if case.slow else ()) for case in CASES]
)
def test_a_plan_computes_what_one_process_computes(
    case: Case, ranks: Callable[[int], PoolWorld], reference: Callable[[Case], verify.VerifyRun]
) -> None:
    if case.model == "hf" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    source, plan = MODELS[case.model], case.plan
    known = reference(case)
    assert known.losses[-1] < known.losses[0], "the reference does not learn: nothing would be shown"
    if plan.clip is not None:
        assert known.norms[0] > 2 * plan.clip, "clipping does nothing: nothing would be shown"
    found = verify.merge(ranks(plan.mesh.world).run(verify.run_rank, source, plan, STEPS))
    bounds = verify.Bounds() if plan.precision == "fp32" else ranks(1).run(verify.bounds_rank, source, plan, known, STEPS)[0]
    difference = verify.compare(known, found, bounds)
    print(f"{case.name}: {difference}")
    assert difference.good, difference
