"""Kernels of foretell's own in a plan: what is traced, priced and legal with them, and that a run has them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import foretell
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.kernels import catalog
from foretell.kernels.names import KERNELS, NAMESPACE, PARTS_PER_SM, efficiency, faster_on
from foretell.options.kernels import kernels_of
from foretell.plan import file, legal
from foretell.plan.default import default_plan
from foretell.plan.recipe import recipe_of
from foretell.plan.types import Mesh, Plan
from foretell.price.kernels.features import Shape
from foretell.price.kernels.scratch import scratch
from foretell.price.time import own_seconds
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.types import Op, Trace

SMALL = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab_size": 64, "context": 16}
SOURCE = Source(model="llama-tiny", overrides=SMALL, micro_batch=2)
FORWARD, BACKWARD = f"{NAMESPACE}.rms_norm.default", f"{NAMESPACE}.rms_norm_backward.default"
ATEN = ("aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default")


def traced(**how: Any) -> Trace:
    return capture(lambda: load(SOURCE), Recipe(**how))


def norms(trace: Trace, names: tuple[str, str]) -> list[Op]:
    return [op for program in trace.programs.values() for op in program.ops if op.name in names]


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_trace_has_the_kernels_where_it_had_torchs_own_and_formats_stay(precision: str, recompute: str) -> None:
    plain, own = (traced(precision=precision, recompute=recompute, kernels=names) for names in ((), ("rms_norm", "layer_norm")))
    assert own.meta["kernels"] == {"rms_norm": 5, "layer_norm": 0} and "kernels" not in plain.meta
    theirs, mine = norms(plain, ATEN), norms(own, (FORWARD, BACKWARD))
    assert len(mine) == len(theirs) == (10 if recompute == "none" else 14) and not norms(own, ATEN)
    for one, other in zip(theirs, mine, strict=True):
        assert one.name.split(".")[1].removeprefix("_fused_") == other.name.split(".")[1]
        assert (one.module, one.phase) == (other.module, other.phase)
        assert one.outputs[0].spec == other.outputs[0].spec and one.inputs[0].spec == other.inputs[0].spec


def test_what_is_kept_for_backward_is_as_many_bytes_as_the_kernel_says() -> None:
    """A deviation for each row, in float32, beside what was there before."""
    own = traced(precision="bf16", kernels=("rms_norm",))
    rows = 2 * SMALL["context"]
    for op in norms(own, (FORWARD, BACKWARD)):
        if op.name == FORWARD:
            assert op.outputs[1].spec.nbytes == catalog.find("rms_norm").saved_bytes({"rows": rows, "width": SMALL["dim"]}, 2) == 4 * rows


def test_scratch_of_a_backward_is_no_less_than_its_launch_asks_for() -> None:
    """The rule knows the most for a width; how many programs a multiprocessor gets is the kernels' own choice."""
    for name in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"):
        for bucket in catalog.find(name).buckets:
            least, most = bucket.limits["width"]
            for width in (least, most):
                assert bucket.config["per_sm"] <= next(each for limit, each in PARTS_PER_SM if width <= limit)
    backward = next(op for op in norms(traced(precision="fp32", kernels=("rms_norm",)), (FORWARD, BACKWARD)) if op.name == BACKWARD)
    assert scratch(backward, (9, 0)) == (2 * SMALL["context"] * SMALL["dim"] * 4,)  # fewer rows than programs


def row(**more: Any) -> dict[str, Any]:
    shape = {"rows": 1024, "width": 1024}
    seconds = {"seconds": 2e-5, "floor_seconds": 1e-5, "speedup": 1.5}
    return {"kernel": "rms_norm", "device": "NVIDIA H200", "dtype": "bfloat16", "shape": shape, **seconds, **more}


def test_rows_say_where_kernels_are_faster_and_how_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    small = row(shape={"rows": 8, "width": 64}, speedup=0.9, seconds=1e-4)
    rows = (row(), small, row(kernel="layer_norm"), row(kernel="layer_norm", device="NVIDIA A100"))
    assert faster_on("H200-SXM-141GB", "bfloat16", rows) == ("layer_norm",)
    assert faster_on("H100-SXM-80GB", "bfloat16", rows) == faster_on("H200-SXM-141GB", "float32", rows) == ()
    assert efficiency("rms_norm", "H200-SXM-141GB", "bfloat16", 1 << 20, rows) == 0.5
    assert efficiency("rms_norm", "H200-SXM-141GB", "bfloat16", 512, rows) == pytest.approx(0.1)
    assert efficiency("rms_norm", "H100-SXM-80GB", "bfloat16", 512, rows) is None
    monkeypatch.setattr("foretell.kernels.names.measured_rows", lambda: rows)
    h200, h100 = parse("H200"), parse("H100")
    assert kernels_of(("auto",), h200, "bfloat16") == ("layer_norm",) and kernels_of(("auto",), h100, "bfloat16") == ()
    assert kernels_of(("auto", "rms_norm"), h200, "bfloat16") == ("rms_norm", "layer_norm")
    forward = norms(traced(precision="bf16", kernels=("rms_norm",)), (FORWARD, BACKWARD))[0]
    shape = Shape(forward.name, tuple(ref.spec for ref in forward.inputs), tuple(ref.spec for ref in forward.outputs), forward.attrs)
    moved = sum(ref.spec.nbytes for ref in (*forward.inputs, *forward.outputs))
    assert own_seconds(shape, h200.device) == pytest.approx(moved / (0.1 * h200.device.memory_bandwidth_bytes_per_second))
    assert own_seconds(shape, h100.device) is None


def test_names_are_those_of_the_catalog() -> None:
    assert set(KERNELS) == set(catalog.KERNELS)


def test_a_plan_says_them_and_reads_them_back() -> None:
    plan = default_plan(Recipe(kernels=("rms_norm",)), {"model": "llama-tiny"}, "H100")
    assert plan.kernels == {"rms_norm": "foretell"} and file.from_json(file.to_json(plan)) == plan
    assert recipe_of(plan).kernels == ("rms_norm",) and Recipe.from_json(recipe_of(plan).to_json()) == recipe_of(plan)
    assert "kernels" not in Recipe().to_json()


@pytest.mark.parametrize(("changes", "why"), [
    ({"kernels": {"rms_norm": "magic"}}, "'magic' is not known"), ({"kernels": {"matmul": "foretell"}}, "no such kernel"),
    ({"kernels": {"rms_norm": "foretell"}, "mesh": Mesh(tp=2)}, "mesh.tp is 2"),
    ({"kernels": {"rms_norm": "foretell"}, "mesh": Mesh(cp=2)}, "mesh.cp is 2"),
])  # fmt: skip
def test_a_plan_that_cannot_be_run_with_them_says_why(changes: dict[str, Any], why: str) -> None:
    plan = Plan(**{"model": {"model": "llama-tiny"}, "hardware": "H100", **changes})
    assert any(one.field.startswith("kernels[") and why in one.problem for one in legal.complaints(plan))
    fine = plan.with_(kernels={"rms_norm": "foretell", "loss": "compiled"}, mesh=Mesh(dp_shard=2))
    assert not legal.complaints(fine)


def test_bad_questions_are_one_line() -> None:
    for hardware, asked, words in (("cpu", ("rms_norm",), "runs none of them"), ("H100", ("magic",), "kernel magic is not known")):
        with pytest.raises(UserError, match=words):
            kernels_of(asked, parse(hardware), "bfloat16")
    assert kernels_of(("auto",), parse("cpu"), "float32") == kernels_of(None, parse("cpu"), "float32") == ()
    with pytest.raises(UserError, match="unknown kernel 'magic'"):
        Recipe(kernels=("magic",))


def test_an_answer_tells_how_many_modules_have_them_and_what_is_assumed() -> None:
    found = foretell.fit("llama-tiny", hardware="H100", overrides=SMALL, kernels=("rms_norm", "layer_norm"))
    told = " | ".join(found.assumptions)
    assert "by foretell's kernels: rms_norm of 5 modules, layer_norm of no module" in told
    assert "rms_norm: not measured on H100-SXM-80GB; assumed" in told and "layer_norm: not" not in told


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_run_has_what_its_plan_says_and_the_model_keeps_its_parameters() -> None:
    plan = Plan(model={}, hardware="auto", micro_batch=2, precision="fp32", clip=None, kernels={"rms_norm": "foretell"})
    work = verify.build(SOURCE)
    names = dict(work.model.named_parameters())
    job = apply(work, plan, start(plan, device="cpu"))
    with Counted() as counted:
        job.backward(verify.batches(SOURCE, 1))
    assert counted.ops[FORWARD] == counted.ops[BACKWARD] == 5 and not any("_fused_rms_norm" in name for name in counted.ops)
    assert dict(work.model.named_parameters()).keys() == names.keys() == work.model.state_dict().keys()
    assert all(torch.equal(one, names[name]) for name, one in work.model.named_parameters())
