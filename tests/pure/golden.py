"""Plans of every kind that foretell predicts, and what is predicted of them: kept in tests/data/golden.json.gz.

    python -m tests.pure.golden --write       after a change that is meant to change numbers; say in the commit which and why
    python -m tests.pure.golden               what differs from what is kept
"""

from __future__ import annotations

import functools
import gzip
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.types import Cluster
from foretell.plan.blocks import even_cuts
from foretell.plan.types import AWAY, Mesh, Pipeline, Plan, Residency, Split
from foretell.search.traces.needed import Traces, question
from foretell.simulate.plan import Options, PlanCost, predict_plan

KEPT = Path(__file__).resolve().parents[1] / "data" / "golden.json.gz"
GPT = {"model": "gpt2", "overrides": {"layers": 4}, "seq": 256}
LLAMA = {"model": "llama3-1b", "overrides": {"layers": 2, "vocab_size": 8192}, "seq": 512}
MOE = {"model": "mixtral-tiny"}
VISION = {"model": "resnet-tiny", "image": 64}
BLOCKS = tuple(f"blocks.{number}" for number in range(4))
ROUNDING = 1e-9
OPTIONS = Options(profile_of=functools.cache(find_profile))


class Here(Traces):
    """Traces made in this process: the models are the project's own."""

    def _made(self, requests: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        from foretell.search.traces.child import answer

        for asked in requests:
            if question(asked) not in _MADE:
                reply = json.loads(json.dumps(answer(asked)))
                assert "error" not in reply, reply
                _MADE[question(asked)] = (reply.pop("text"), reply)
        return [_MADE[question(asked)] for asked in requests]


_MADE: dict[str, tuple[str, dict[str, Any]]] = {}
"""Traces are made once."""


@functools.cache
def traces(capability: tuple[int, int] | None) -> Here:
    """One for each kind of device, shared by all cases."""
    return Here(capability=capability, cache=False)


def everywhere(mode: str) -> dict[str, Residency]:
    return {"blocks.0-3": Residency(mode=mode)}


def pipe(schedule: str, stages: int, blocks: int = 4) -> Pipeline:
    return Pipeline(schedule=schedule, cuts=even_cuts(BLOCKS[:blocks], stages))


@dataclass(frozen=True)
class Case:
    """A plan and where it runs."""

    name: str
    on: str
    plan: Plan

    @property
    def cluster(self) -> Cluster:
        return parse(self.on)

    def cost(self) -> PlanCost:
        cluster = self.cluster
        on_cpu = cluster.device.backend == "cpu"
        known = traces(None if on_cpu else cluster.device.compute_capability or (9, 0))
        modes = {"keep"} | {one.mode for one in self.plan.blocks.values() if one.mode not in AWAY}
        return predict_plan(known.of(self.plan, sorted(modes)), self.plan, cluster, OPTIONS)


def _cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    sixteen = {"micro_batch": 2, "accumulate": 8}
    yield "plain", "H200", {}
    yield "plain, A100", "A100", {"micro_batch": 4}
    yield "plain, larger", "H200", {"micro_batch": 6}
    yield "plain, not clipped", "H200", {"clip": None}
    yield "plain, convolutions", "H200", {"model": VISION, "micro_batch": 4, "optimizer": "momentum"}
    yield "fp32", "H200", {"precision": "fp32"}
    yield "bf16", "H200", {"precision": "bf16", "optimizer": "adamw"}
    yield "fp16 with a scaler", "T4", {"precision": "fp16-mixed"}
    yield "accumulated", "H200", {"accumulate": 4}
    yield "recompute", "H200", {"blocks": everywhere("recompute"), "micro_batch": 4}
    yield "selective", "H200", {"blocks": everywhere("selective"), "micro_batch": 4}
    yield "recompute some", "H200", {"blocks": {"blocks.0-1": Residency(mode="recompute")}, "micro_batch": 4}
    yield "compiled", "H200", {"compile": "model"}
    yield "compiled blocks", "H200", {"compile": "blocks", "accumulate": 2}
    yield "compiled, CUDA graphs", "H200", {"compile": "graphs"}
    eight: dict[str, Any] = {"mesh": Mesh(dp_shard=8)}
    yield "fsdp", "H100:8", eight
    yield "fsdp, accumulated", "H100:8", {**eight, "accumulate": 4}
    yield "fsdp, kept whole after forward", "H100:8", {**eight, "reshard": False}
    yield "fsdp, four after forward", "H100:8", {**eight, "reshard": 4}
    yield "fsdp, recompute", "H100:8", {**eight, "blocks": everywhere("recompute")}
    yield "fsdp, compiled", "H100:8", {**eight, "compile": "model"}
    yield "fsdp, fp32", "H100:8", {**eight, "precision": "fp32"}
    yield "fsdp, T4", "T4:4", {"mesh": Mesh(dp_shard=4), "precision": "fp16-mixed"}
    yield "hsdp", "2x8xH100", {"mesh": Mesh(dp_replicate=2, dp_shard=8)}
    yield "hsdp, accumulated", "H100:8", {"mesh": Mesh(dp_replicate=4, dp_shard=2), "accumulate": 3}
    yield "replicas", "H100:4", {"mesh": Mesh(dp_replicate=4)}
    yield "tp", "H100:2", {"mesh": Mesh(tp=2), "model": LLAMA}
    yield "tp, no sequence", "H100:2", {"mesh": Mesh(tp=2), "model": LLAMA, "split": Split(sequence=False)}
    yield "tp in fsdp", "H100:8", {"mesh": Mesh(tp=2, dp_shard=4), "model": LLAMA, "accumulate": 2}
    yield "tp, recompute", "H100:4", {"mesh": Mesh(tp=2, dp_shard=2), "model": LLAMA, "blocks": {"blocks.0-1": Residency(mode="recompute")}}
    for schedule, stages in (("gpipe", 2), ("1f1b", 2), ("interleaved-1f1b", 4), ("zero-bubble", 4), ("zero-bubble-v", 4)):
        yield f"pp, {schedule}", "H100:2", {**sixteen, "mesh": Mesh(pp=2), "pipeline": pipe(schedule, stages)}
    yield "pp in fsdp", "H100:4", {**sixteen, "mesh": Mesh(pp=2, dp_shard=2), "pipeline": pipe("1f1b", 2)}
    yield "pp, four stages, recompute", "H100:4", {
        **sixteen, "mesh": Mesh(pp=4), "pipeline": pipe("1f1b", 4), "blocks": everywhere("recompute"),
    }  # fmt: skip
    yield "pp and tp", "H100:4", {**sixteen, "mesh": Mesh(pp=2, tp=2), "pipeline": pipe("1f1b", 2, 2), "model": LLAMA}
    yield "pp, compiled", "H100:2", {**sixteen, "mesh": Mesh(pp=2), "pipeline": pipe("1f1b", 2), "compile": "blocks"}
    yield "cp", "H100:2", {"mesh": Mesh(cp=2), "model": LLAMA}
    yield "cp in fsdp", "H100:4", {"mesh": Mesh(cp=2, dp_shard=2), "model": LLAMA}
    yield "ep", "H100:4", {"mesh": Mesh(dp_shard=4, ep=2), "model": MOE}
    away = {"states": {"blocks.0-3": "host", "rest": "host"}, "micro_batch": 2}
    yield "states on the host", "H200", away
    yield "states on the host, by the CPU", "H200", {**away, "cpu_share": 0.5, "state_format": "bf16", "precision": "bf16-master"}
    yield "states and weights on the host", "H200", {**away, "weights": {"blocks.0-3": "host"}, "precision": "bf16-master"}
    yield "split masters", "H200", {"precision": "bf16-master", "state_format": "split", **away}
    yield "activations on the host", "H200", {"blocks": everywhere("host"), "micro_batch": 4}
    yield "states on the host in fsdp", "H100:2", {**away, "mesh": Mesh(dp_shard=2)}
    yield "CPU", "CPU", {"precision": "fp32", "micro_batch": 2}
    yield "CPU, accumulated", "CPU", {"precision": "fp32", "accumulate": 3, "blocks": everywhere("recompute")}
    yield "CPU, two ranks", "CPU", {"precision": "fp32", "mesh": Mesh(dp_shard=2)}
    yield "CPU, pipeline", "CPU", {"precision": "fp32", **sixteen, "mesh": Mesh(pp=2), "pipeline": pipe("1f1b", 2)}


CASES = {name: Case(name, on, Plan(**{"model": GPT, "hardware": on, **changes})) for name, on, changes in _cases()}


def told(cost: PlanCost) -> dict[str, Any]:
    """The numbers of a prediction that golden files keep."""
    time = cost.time
    return {
        "verdict": cost.verdict,
        "ranks": [
            {
                "allocated": rank.memory.allocated_bytes, "reserved": rank.memory.reserved_bytes,
                "device": rank.memory.device_bytes, "host": rank.memory.host_bytes,
                "categories": dict(rank.memory.categories), "seconds": rank.seconds,
                "collectives": [[one.name, one.axis, one.ranks, one.nbytes, one.times] for one in rank.collectives],
            }
            for rank in cost.ranks
        ],
        "time": time and {
            "step": time.step_seconds, "low": time.low_seconds, "high": time.high_seconds, "breakdown": dict(time.breakdown),
            "phases": dict(time.phases), "binds": time.binds, "provenance": time.provenance,
        },
        "bubble": cost.bubble, "per_step": cost.per_step, "flops": cost.model_flops,
    }  # fmt: skip


def differences(kept: Any, found: Any, at: str = "") -> Iterator[str]:
    """What differs; numbers by more than rounding on another kind of CPU could."""
    if isinstance(kept, dict) and isinstance(found, dict):
        for name in sorted({*kept, *found}):
            yield from differences(kept.get(name), found.get(name), f"{at}.{name}")
    elif isinstance(kept, list) and isinstance(found, list) and len(kept) == len(found):
        for number, (one, other) in enumerate(zip(kept, found, strict=True)):
            yield from differences(one, other, f"{at}[{number}]")
    elif isinstance(kept, float) and isinstance(found, float):
        if not math.isclose(kept, found, rel_tol=ROUNDING, abs_tol=1e-15):
            yield f"{at}: {kept:.6g} → {found:.6g} ({found / kept - 1:+.2%})" if kept else f"{at}: {kept} → {found}"
    elif kept != found:
        yield f"{at}: {kept!r} → {found!r}"


def kept() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(gzip.decompress(KEPT.read_bytes()))
    return found


def main() -> None:
    os.environ["FORETELL_CACHE"] = tempfile.mkdtemp()  # not what was probed on this machine
    found = {name: json.loads(json.dumps(told(case.cost()))) for name, case in CASES.items()}
    old = kept() if KEPT.exists() else {}
    for name, now in found.items():
        for line in differences(old.get(name), now, name):
            print(line[:300])
    if "--write" in sys.argv:
        KEPT.write_bytes(gzip.compress(json.dumps(found, indent=0).encode(), mtime=0))


if __name__ == "__main__":
    main()
