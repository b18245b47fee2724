"""What would make a script faster: changes are made to the step as the file that trains so would have it, and compiled steps are costed so."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.hardware import parse as parse_hardware
from foretell.search.advice.faster_ways import BOUNDED, CHANGES
from foretell.search.advice.script_faster import ScriptSpeedSearch
from foretell.search.traces.followed import Followed, cost, follow
from foretell.simulate.memory.replay import peak_live
from foretell.trace import types
from foretell.trace.inductor.compiled import compile_trace, launches
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import request
from foretell.trace.script.words import parse
from foretell.trace.store.traces import traced

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"
H100 = parse_hardware("H100")


def followed(name: str, **change: object) -> Followed:
    return follow(parse(["python", str(SCRIPTS / f"{name}.py")]), H100, change=change)


def of_file(name: str, **recipe: object) -> types.Trace:
    source = Source(model=f"{SCRIPTS.parent / 'scripts_as_files.py'}:{name}")
    return traced(request(source, Recipe(**recipe), (9, 0), {}))[0]  # type: ignore[arg-type]


def products(trace: types.Trace) -> list[bool]:
    """Of each product of a micro-batch, whether its inputs are rounded to TF32."""
    return [types.TF32 in op.attrs for op in trace.programs["micro_first"].ops if op.name.split(".")[1] in ("mm", "addmm", "bmm")]


LARGER = pytest.mark.slow(reason="the same change of a larger script, as conv_ema")


@pytest.mark.parametrize(
    ("name", "change", "recipe"),
    [
        pytest.param(
            "lightning_images", {"channels_last": True}, {"precision": "fp16-autocast", "optimizer": "momentum", "channels_last": True},
            marks=LARGER,
        ),
        ("conv_ema", {"fused": True}, {"precision": "fp32", "optimizer": "momentum-fused"}),
        ("conv_ema", {"tf32": True}, {"precision": "tf32", "optimizer": "momentum"}),
        pytest.param("lightning_images", {"fused": True}, {"precision": "fp16-autocast", "optimizer": "momentum-fused"}, marks=LARGER),
        pytest.param("accelerate_glue", {"tf32": True}, {"precision": "tf32", "optimizer": "adamw", "accumulate": 3}, marks=LARGER),
    ],
)  # fmt: skip
def test_a_changed_script_needs_what_the_file_that_trains_so_needs(name: str, change: dict[str, object], recipe: dict[str, object]) -> None:
    step, file = followed(name, **change), of_file(name, **recipe)
    mine, theirs = (peak_live(one, tuple(one.schedule)) for one in (step.trace, file))
    assert abs(mine / theirs - 1) < 0.001
    mine_products, their_products = products(step.trace), products(file)
    assert mine_products == their_products
    assert "tf32" not in change or all(mine_products)
    if "fused" in change:
        assert step.recipe.optimizer == recipe["optimizer"]


def test_what_a_step_leaves_to_the_next_stays_eager_and_the_model_is_compiled() -> None:
    """An EMA's ops are where they were, and the model has as many launches as in a first step."""
    eager = followed("conv_ema").trace
    before, after = launches(eager), launches(compile_trace(eager))
    left = [op for op in eager.programs["again"].ops if op.phase == "update"]
    assert len(left) > 3 and compile_trace(eager).programs["again"].ops[: len(left)] == tuple(left)
    assert after["micro_first"] < before["micro_first"]
    assert after["again"] - after["micro_first"] == before["again"] - before["micro_first"]


def test_gains_are_told_best_first_and_hold_when_the_change_is_made() -> None:
    step = followed("conv_ema")
    plain = cost(step, H100, "H100")
    found = ScriptSpeedSearch(step, H100, "H100", plain, seconds=600).advice()
    assert plain.time is not None and found.whole and found.tried >= 4
    assert [gain.speedup for gain in found.gains] == sorted((gain.speedup for gain in found.gains), reverse=True)
    assert all(gain.low > 1 for gain in found.gains) and all(gain.low <= 1 < gain.speedup for gain in found.unsure)
    by_words = {gain.change: gain for gain in (*found.gains, *found.unsure)}
    fused = next(gain for words, gain in by_words.items() if "fused" in words)
    again = cost(followed("conv_ema", fused=True), H100, "H100")
    assert again.time is not None and fused.step_seconds == again.time.step_seconds
    assert fused.speedup == pytest.approx(plain.time.step_seconds / again.time.step_seconds)
    assert {gain.maths for words, gain in by_words.items() if "compile" in words or "autocast" in words} <= {BOUNDED}
    assert all(gain.maths == CHANGES for words, gain in by_words.items() if "batch" in words)


def test_a_script_that_compiles_its_model_is_costed_as_compiled() -> None:
    step = followed("gpt_compiled")
    assert step.recipe.compile == "model" and not any("eager" in str(line) for line in step.trace.meta["assumed"])  # type: ignore[attr-defined]
    plan = cost(step, H100, "H100")
    assert plan.time is not None and plan.plan.compile == "model"
    assert "torch.compile" not in " ".join(gain.change for gain in ScriptSpeedSearch(step, H100, "H100", plain=plan, seconds=0.0).advice().gains)


@pytest.mark.slow(reason="a script that compiles its model is above")
def test_a_file_that_compiles_its_model_is_costed_as_compiled(tmp_path: Path) -> None:
    from foretell import api

    file = tmp_path / "net.py"
    text = "import torch\nfrom torch import nn\n\n\ndef build():\n    layers = [m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU())]\n"
    text += "    net = nn.Sequential(*layers)\n"
    text += "    return {}\n\n\ndef batch(n):\n    return torch.randn(n, 512)\n\n\ndef loss(output, batch):\n    return output.square().mean()\n"
    file.write_text(text.format("torch.compile(net)"))
    inside = api.fit(f"{file}:build", hardware="H100", micro_batch=1024)
    file.write_text(text.format("net"))
    outside, eager = (api.fit(f"{file}:build", hardware="H100", micro_batch=1024, compile=how) for how in (True, False))
    assert inside.time is not None and outside.time is not None and eager.time is not None
    assert inside.time.step_seconds == outside.time.step_seconds != eager.time.step_seconds
    assert inside.memory.device_bytes == outside.memory.device_bytes
