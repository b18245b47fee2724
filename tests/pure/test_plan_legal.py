"""Which plans can be run, and what to try where one cannot."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.plan import legal
from foretell.plan.facts import Facts, facts_of
from foretell.plan.types import KEEP, SCHEDULES, Mesh, Pipeline, Plan, Residency, Split
from tests.pure.plan_cases import GPT, RECOMPUTE, SELECTIVE, TWELVE, plan

# ---------------------------------------------------------------- legality


def cut(schedule: str, *cuts: str) -> Pipeline:
    return Pipeline(schedule=schedule, cuts=cuts)


PIPED = plan(mesh=Mesh(pp=4), pipeline=cut("1f1b", "blocks.3", "blocks.6", "blocks.9"), accumulate=8)
ZERO = PIPED.with_(pipeline=cut("zero-bubble", "blocks.3", "blocks.6", "blocks.9"))
KNOWN = Facts(
    blocks=TWELVE,
    heads=12,
    kv_heads=4,
    seq=1024,
    devices=8,
    devices_per_node=8,
    dtypes=frozenset({"float32", "bfloat16"}),
)

GOOD = {
    "one rank": plan(),
    "sharded": plan(mesh=Mesh(dp_replicate=2, dp_shard=4), reshard=2),
    "positions shared": plan(mesh=Mesh(dp_shard=2, cp=2, tp=2), reshard=4),
    "experts shared": plan(mesh=Mesh(dp_replicate=2, dp_shard=4, ep=2)),
    "three axes": plan(mesh=Mesh(pp=2, dp_shard=2, tp=2), pipeline=cut("1f1b", "blocks.5"), accumulate=2),
    "gpipe with few micro-batches": PIPED.with_(pipeline=cut("gpipe", "blocks.3", "blocks.6", "blocks.9"), accumulate=1),
    "looped": PIPED.with_(pipeline=cut("interleaved-1f1b", *TWELVE[1:8]), accumulate=10),
    "back and forth": PIPED.with_(pipeline=cut("zero-bubble-v", *TWELVE[1:8]), accumulate=3),
    "zero-bubble sharded": ZERO.with_(mesh=Mesh(pp=4, dp_shard=2), reshard=False),
    "blocks compiled": plan(compile="blocks", blocks={"blocks.0-3": SELECTIVE, "blocks.2": KEEP}),
    "odd vocabulary and sequence": plan(model={**GPT, "seq": 1023}, mesh=Mesh(tp=2), split=Split(sequence=False)),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_what_is_legal_has_no_complaint(name: str) -> None:
    assert legal.complaints(GOOD[name], KNOWN if name != "odd vocabulary and sequence" else None) == ()
    legal.check(GOOD[name], KNOWN if name != "odd vocabulary and sequence" else None)


@pytest.mark.parametrize(
    ("wrong", "field", "problem", "remedy"),
    [
        (plan(mesh=Mesh(tp=0)), "mesh.tp", "is 0", "1"),
        (plan(mesh=Mesh(dp_shard=True)), "mesh.dp_shard", "is True", "1"),
        (plan(micro_batch=-2), "micro_batch", "is -2", "1"),
        (plan(accumulate=1.5), "accumulate", "is 1.5", "1"),
        (plan(clip=0.0), "clip", "is 0.0", "null"),
        (plan(clip=float("nan")), "clip", "is nan", "null"),
        (plan(reshard=0), "reshard", "is 0", "1"),
        (plan(precision="fp16"), "precision", "'fp16' is not known", "fp16-mixed"),
        (plan(precision="bf15"), "precision", "'bf15' is not known", "bf16"),
        (plan(optimizer="adamw-fussed"), "optimizer", "not known", "adamw-fused"),
        (plan(compile="block"), "compile", "'block' is not known", "blocks"),
        (plan(blocks={"blocks.0": Residency(mode="offload")}), "blocks['blocks.0']", "'offload' is not known", "keep"),
        (PIPED.with_(pipeline=cut("1f1", *PIPED.pipeline.cuts)), "pipeline.schedule", "'1f1'", "1f1b"),
        (plan(mesh=Mesh(cp=3)), "mesh.cp", "1024 tokens cannot be shared evenly by 3 ranks", "1023 tokens"),
        (plan(mesh=Mesh(cp=2), compile="blocks"), "compile", "mesh.cp is 2", "compile none"),
        (plan(mesh=Mesh(cp=2, dp_shard=2), reshard=3), "reshard", "no divisor of dp_shard × cp, which is 4", "divisor"),
        (plan(mesh=Mesh(ep=4, dp_shard=6)), "mesh.ep", "dp_shard, of which it is a part, is 6", "that 4 divides"),
        (plan(mesh=Mesh(ep=2, dp_shard=2, tp=2)), "mesh.ep", "split over tp 2", "tp 1"),
        (plan(mesh=Mesh(ep=2, dp_shard=2), compile="blocks"), "compile", "mesh.ep is 2", "compile none"),
        (plan(precision="float8"), "precision", "the device has no products in float8", "bf16-mixed"),
        (plan(mesh=Mesh(dp_replicate=2, dp_shard=8)), "mesh", "dp_replicate 2 × dp_shard 8 makes 16 ranks and there are 8", "8 instead of 16"),
        (PIPED.with_(mesh=Mesh(pp=4, tp=4)), "mesh", "makes 16 ranks", "smaller pp or tp"),
        (plan(mesh=Mesh(pp=3)), "pipeline", "no cut says", "cuts blocks.4, blocks.8"),
        (plan(mesh=Mesh(pp=3), pipeline=Pipeline()), "pipeline", "no cut says", "cuts blocks.4, blocks.8"),
        (plan(pipeline=cut("1f1b", "blocks.3")), "pipeline", "2 stages and mesh.pp is 1", "larger pp"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.3", "blocks.6")), "pipeline.cuts", "1f1b on 4 ranks wants one a rank", "cuts blocks.3"),
        (PIPED.with_(pipeline=cut("gpipe", *TWELVE[1:8])), "pipeline.cuts", "8 stages", "cuts blocks.3"),
        (ZERO.with_(pipeline=cut("zero-bubble", *TWELVE[1:6])), "pipeline.cuts", "zero-bubble on 4 ranks wants a multiple of 4", "cuts"),
        (ZERO.with_(pipeline=cut("zero-bubble-v", *PIPED.pipeline.cuts)), "pipeline.cuts", "wants two a rank, 8", "cuts blocks.2, blocks.4"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.3", "blocks.3", "blocks.9")), "pipeline.cuts", "blocks.3 is cut twice", "another block"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.3", "block.6", "blocks.9")), "pipeline.cuts", "'block.6' is no block", "blocks.6"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.6", "blocks.3", "blocks.9")), "pipeline.cuts", "order", "blocks.3, blocks.6, blocks.9"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.0", "blocks.3", "blocks.9")), "pipeline.cuts", "would have none", "cuts blocks.3, blocks.6"),
        (PIPED.with_(accumulate=3), "accumulate", "at least 4 micro-batches and gets 3", "accumulate 4"),
        (ZERO.with_(accumulate=11), "accumulate", "2 rounds, and 11", "accumulate 10 or 12"),
        (ZERO.with_(compile="model"), "compile", "backward twice", "compile none"),
        (ZERO.with_(blocks={"blocks.0-3": SELECTIVE}), "blocks['blocks.0-3']", "selective recompute does not allow", "interleaved-1f1b"),
        (ZERO.with_(blocks={"blocks.*": RECOMPUTE}), "blocks['blocks.*']", "computes the whole block again for every part", "interleaved-1f1b"),
        (plan(mesh=Mesh(dp_shard=2), placement=(0, 0)), "placement", "each of the 2 devices 0 to 1 once", "no placement"),
        (plan(mesh=Mesh(dp_shard=2), placement=(1, 2)), "placement", "each of the 2 devices", "one device for each rank"),
        (ZERO.with_(mesh=Mesh(pp=4, dp_shard=2)), "reshard", "get no gradients", "reshard false"),
        (ZERO.with_(mesh=Mesh(pp=4, dp_replicate=2)), "reshard", "get no gradients", "reshard false"),
        (plan(mesh=Mesh(tp=8)), "mesh.tp", "12 attention heads cannot be split over 8 ranks", "tp 4"),
        (plan(mesh=Mesh(tp=6)), "mesh.tp", "4 key-value heads cannot be split over 6 ranks", "tp 4"),
        (plan(mesh=Mesh(dp_shard=8), reshard=3), "reshard", "3 is no divisor of dp_shard", "divisor"),
        (plan(blocks={"layers.*": RECOMPUTE}), "blocks['layers.*']", "layers.* is no block", "blocks.0-11"),
        (plan(blocks={"blocks.8-15": RECOMPUTE}), "blocks['blocks.8-15']", "blocks.12-15 is no block", "blocks.0-11"),
        (plan(blocks={"blocks.0-3": RECOMPUTE, "blocks.2-5": SELECTIVE}), "blocks['blocks.2-5']", "otherwise than blocks.0-3", "one residency"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_something_to_try(wrong: Plan, field: str, problem: str, remedy: str) -> None:
    found = [one for one in legal.complaints(wrong, KNOWN) if one.field == field and problem in one.problem]
    assert len(found) == 1, legal.complaints(wrong, KNOWN)
    assert remedy in found[0].remedy
    assert "\n" not in str(found[0]) and str(found[0]).count("; try: ") == 1
    with pytest.raises(UserError, match="the plan cannot be run"):
        legal.check(wrong, KNOWN)


def test_following_a_remedy_helps() -> None:
    """Cuts, micro-batches and degrees that are suggested are legal themselves."""
    seen = 0
    for schedule in SCHEDULES:
        for ranks in (2, 3, 4):
            for micro in range(1, 20):
                wrong = plan(mesh=Mesh(pp=ranks), pipeline=cut(schedule, "blocks.7"), accumulate=micro)
                for one in legal.complaints(wrong, KNOWN):
                    seen += 1
                    if one.field == "pipeline.cuts":
                        cuts = tuple(one.remedy.removeprefix("cuts ").split(", "))
                        mended = wrong.with_(pipeline=Pipeline(schedule=schedule, cuts=cuts))
                        assert not any(other.field == "pipeline.cuts" for other in legal.complaints(mended, KNOWN))
                    else:
                        for number in map(int, re.findall(r"\d+", one.remedy.split(", or")[0])):
                            mended = wrong.with_(accumulate=number)
                            assert not any(other.field == "accumulate" for other in legal.complaints(mended, KNOWN))
    assert seen > 100


def test_a_tensor_that_one_stage_uses_twice() -> None:
    inside = replace(KNOWN, tied=(("blocks.4.w", "blocks.5.w"),))
    assert [one.field for one in legal.complaints(ZERO, inside)] == ["pipeline.schedule"]
    assert legal.complaints(PIPED, inside) == ()
    for names in (("blocks.0.w", "blocks.1.w"), ("blocks.2.w", "blocks.5.w"), ("tokens.weight", "blocks.5.w")):
        assert legal.complaints(ZERO, replace(KNOWN, tied=(names,))) == (), "the first stage, or two stages"


def test_processes_that_were_started() -> None:
    wide = plan(mesh=Mesh(dp_shard=16), hardware="2x8xH100")
    facts = Facts(devices=16, devices_per_node=8, world=4)
    (one,) = legal.complaints(wide, facts)
    assert "makes 16 processes and 4 processes started" in one.problem
    assert one.remedy == "torchrun --nnodes 2 --nproc-per-node 8 -m foretell run PLAN"
    assert legal.launch(wide) == "torchrun --nproc-per-node 16 -m foretell run PLAN"
    assert legal.launch(plan()) == "foretell run PLAN"
    assert (
        legal.launch(plan(mesh=Mesh(dp_shard=12)), 8) == "torchrun --nnodes 2 --nproc-per-node 6 -m foretell run PLAN"
    )


@pytest.mark.parametrize(
    ("wanted", "remedy"),
    [(96, "accumulate 12"), (36, "micro_batch 3 and accumulate 6"), (97, "that 2 data ranks divide")],
)
def test_a_global_batch_that_was_asked_for(wanted: int, remedy: str) -> None:
    made = plan(mesh=Mesh(dp_shard=2), micro_batch=4, accumulate=8)
    assert legal.complaints(made, Facts(global_batch=64)) == ()
    (one,) = legal.complaints(made, Facts(global_batch=wanted))
    assert f"makes 64 samples a step, not {wanted}" in one.problem and remedy in one.remedy


def test_hardware_gives_facts() -> None:
    facts = facts_of(plan(), parse("2x8xH100"))
    assert (facts.devices, facts.devices_per_node, facts.blocks, facts.seq) == (16, 8, TWELVE, 1024)
    assert legal.complaints(plan(), facts) == ()
    (one,) = legal.complaints(plan(), facts_of(plan(), parse("V100")))
    assert one.field == "precision" and one.remedy == "fp16-mixed, or fp32"
    shared = replace(parse("V100"), device=replace(parse("V100").device, backend="cpu"))
    assert legal.complaints(plan(mesh=Mesh(dp_shard=2)), facts_of(plan(), shared)) == (), "ranks may share a CPU"


def test_what_is_not_known_is_not_complained_of() -> None:
    strange = plan(model={"model": "x"}, mesh=Mesh(tp=7, dp_shard=99), blocks={"layers.*": RECOMPUTE}, hardware="auto")
    assert legal.complaints(strange, Facts()) == ()


def test_a_model_without_blocks() -> None:
    bare = plan(model={"model": "x", "blocks": []}, mesh=Mesh(pp=2), compile="blocks", blocks={"blocks.*": RECOMPUTE})
    told = {one.field: one.remedy for one in legal.complaints(bare)}
    assert "no repeated blocks" in told["pipeline"] and told["compile"] == "compile model"
    assert "no repeated blocks" in told["blocks['blocks.*']"]


def test_all_complaints_are_told_at_once() -> None:
    with pytest.raises(UserError, match=r"\(and 2 more\)") as raised:
        legal.check(plan(mesh=Mesh(cp=2, ep=2), optimizer="wholly"), KNOWN)
    assert raised.value.detail.count("; try: ") == 3
