"""The cases of benchmarks/plans.py: a model, a batch and a limit of memory; and every plan that is tried for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30
RESIDENCIES = ("keep", "selective", "half", "recompute")
"""Of all blocks alike; half: the first half of the blocks is computed again, the others keep."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question to the chooser: this model, this batch, so much memory."""

    name: str
    model: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seq: int | None = None
    global_batch: int
    cap: int
    """Bytes: on a GPU what the caching allocator may reserve, on a CPU the RAM of the machine that is planned for."""
    micro_batches: tuple[int, ...]
    compile: tuple[int, ...] = ()
    """Micro-batches that are run compiled as well, blocks kept, selective and recomputed; empty: eager only."""
    meshes: tuple[Mapping[str, int], ...] = ({},)
    device: str = "cuda"

    def source(self, micro_batch: int = 1) -> Any:
        from foretell.trace.load.model import Source

        return Source(model=self.model, overrides=dict(self.overrides), seq=self.seq, micro_batch=micro_batch)

    @property
    def ranks(self) -> tuple[int, ...]:
        from foretell.plan.types import Mesh

        return tuple(sorted({Mesh(**mesh).world for mesh in self.meshes}))


def _gpu(model: str, cap: float, global_batch: int, micro_batches: Sequence[int], **more: Any) -> Case:
    label = more.pop("label", model)
    return Case(
        name=f"{label} {global_batch} in {cap:g} GiB", model=model, cap=int(cap * GIB), global_batch=global_batch,
        micro_batches=tuple(micro_batches), **more,
    )  # fmt: skip


MOE = {"layers": 6, "dim": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "experts": 8, "top_k": 2}
GPU = (
    _gpu("gpt2", 10, 16, (4, 8, 16), seq=1024, compile=(8, 16)),
    _gpu("gpt2", 7, 16, (2, 4, 8), seq=1024),
    _gpu("gpt2-medium", 16, 16, (4, 8, 16), seq=1024),
    _gpu("llama3-1b", 30, 4, (1, 2, 4), seq=2048),
    _gpu("bert-large", 14, 64, (16, 32, 64), seq=256),
    _gpu("t5-base", 10, 64, (16, 32, 64), seq=256),
    _gpu("vit-l16", 12, 64, (16, 32, 64)),
    _gpu("dit-b2", 8, 128, (32, 64, 128), compile=(64, 128)),
    _gpu("resnet50", 8, 256, (64, 128, 256)),
    _gpu("mixtral-8x7b", 14, 16, (4, 8, 16), overrides=MOE, seq=1024, label="mixtral of 6 blocks"),
)
SMALL_TEXT = {"layers": 4, "dim": 192, "heads": 4, "context": 128, "vocab_size": 1024}
SOLO: tuple[Mapping[str, int], ...] = ({},)
TWO: tuple[Mapping[str, int], ...] = (*SOLO, {"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}, {"pp": 2})
FOUR: tuple[Mapping[str, int], ...] = (
    *TWO, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2},
)  # fmt: skip


def cpu_cases(ranks: int) -> tuple[Case, ...]:
    """Small models on 1, 2 and, asked for 4, 4 gloo ranks; the limits are of RAM."""
    meshes = FOUR if ranks >= 4 else TWO
    few = (*SOLO, {"dp_shard": 2}, {"dp_replicate": 2}, *({"dp_shard": 4},) * (ranks >= 4))

    def of(label: str, model: str, cap: float, batch: int, micro: Sequence[int], over: Mapping[str, Any], **more: Any) -> Case:
        return Case(
            name=f"{label} {batch} in {cap:g} GiB, cpu x{ranks}", model=model, cap=int(cap * GIB), global_batch=batch,
            micro_batches=tuple(micro), overrides=over, device="cpu", **{"meshes": meshes, **more},
        )  # fmt: skip

    wide = {**SMALL_TEXT, "dim": 384, "heads": 6, "layers": 3}
    return (
        of("gpt", "gpt-tiny", 4, 8, (2, 4, 8), SMALL_TEXT),
        of("gpt", "gpt-tiny", 1, 8, (2, 4, 8), SMALL_TEXT),
        of("wide gpt", "gpt-tiny", 4, 8, (2, 8), wide),
        of("llama", "llama-tiny", 4, 8, (2, 4, 8), {**SMALL_TEXT, "kv_heads": 2, "ffn": 512}),
        of("bert", "bert-tiny", 4, 8, (2, 8), {**SMALL_TEXT, "dropout": 0.0}),
        of("vit", "vit-tiny", 4, 16, (4, 16), {"depth": 4, "dim": 192, "heads": 4, "image": 64}),
        of("resnet", "resnet-tiny", 4, 8, (2, 8), {"width": 24}, meshes=few),
        of("ssm", "ssm-tiny", 4, 4, (1, 4), {"layers": 2, "dim": 96}, meshes=few),
    )


def smoke_cases(device: str) -> tuple[Case, ...]:
    """Does it work at all, in a minute."""
    if device == "cuda":
        return (_gpu("gpt-tiny", 2, 8, (2, 8), compile=(8,)),)
    return (
        Case(
            name="smoke gpt, cpu x2", model="gpt-tiny", cap=4 * GIB, global_batch=4, micro_batches=(2, 4), device="cpu",
            meshes=({}, {"dp_shard": 2}, {"pp": 2}),
        ),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- every plan of a case


def plans_of(case: Case, about: Mapping[str, Any], blocks: Sequence[str]) -> list[Any]:
    """All plans of a case that are legal; `about` is what plans say of the model."""
    from foretell.plan.blocks import even_cuts
    from foretell.plan.types import Mesh, Pipeline, Plan

    found = []
    on_cpu = case.device == "cpu"
    for axes in case.meshes:
        mesh = Mesh(**axes)
        pipeline = Pipeline(schedule="1f1b", cuts=even_cuts(blocks, mesh.pp)) if mesh.pp > 1 else None
        for micro in case.micro_batches:
            each, rest = divmod(case.global_batch, mesh.data * micro)
            if rest or each < max(1, mesh.pp):
                continue
            for residency, compile in _ways(case, micro, bool(blocks)):
                found.append(
                    Plan(
                        model=about, hardware="auto" if on_cpu else "H200", mesh=mesh, pipeline=pipeline, micro_batch=micro,
                        accumulate=each, precision="fp32" if on_cpu else "bf16-mixed", compile=compile,
                        blocks=residencies(residency, blocks),
                    )
                )  # fmt: skip
    return found


def _ways(case: Case, micro: int, stacked: bool) -> Iterator[tuple[str, str]]:
    for residency in RESIDENCIES if stacked and case.device == "cuda" else ("keep", "recompute") if stacked else ("keep",):
        yield residency, "none"
    if micro in case.compile:
        for residency in ("keep", "selective", "recompute") if stacked else ("keep",):
            yield residency, "model"


def residencies(how: str, blocks: Sequence[str]) -> dict[str, Any]:
    from foretell.plan.blocks import compress
    from foretell.plan.types import Residency

    if how == "half":
        return compress(dict.fromkeys(blocks[: (len(blocks) + 1) // 2], Residency(mode="recompute")))
    return compress(dict.fromkeys(blocks, Residency(mode=how)))


def key_of(case: str, plan: Any) -> str:
    """What tells two runs apart."""
    from foretell.plan import file

    said = file.to_json(plan)
    kept = {name: said[name] for name in sorted(said) if name not in ("model", "hardware", "predicted", "notes", "version")}
    return json.dumps({"case": case, **kept}, sort_keys=True)
