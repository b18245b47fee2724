"""What serving would cost: steps put together beside steps predicted whole, bytes that add up, and words that are refused."""

from __future__ import annotations

import functools
import json

import pytest

from foretell import zoo
from foretell.api.serving.forecast import ServingAsked, forecast
from foretell.cli import main
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.lower.serving import PAGED, ROWS, TOKENS, StepShape, generating, layers_of_attention, served_step
from foretell.price.speeds import Options
from foretell.simulate.serving.cost import StepCosts
from foretell.simulate.serving.load import load_of
from foretell.simulate.serving.records import Limit
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload

SIZES = {"layers": 4, "dim": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab_size": 32000}
RECIPE = Recipe(mode="infer", precision="bf16", packed=(TOKENS, ROWS))


@functools.cache
def costs(hardware: str, graphs: bool = True) -> StepCosts:
    entry = zoo.get("llama3-1b")

    def build() -> Workload:
        return Workload(zoo.load(entry).build(**{**entry.config, **SIZES}), {})

    return StepCosts(capture(build, RECIPE), RECIPE, parse(hardware), Options(profile_of=find_profile), cached=16 * 4096, graphs=graphs)


SHAPES = [
    StepShape(1, 700, (), 1), StepShape(12, 12 * 3000, (), 12), StepShape(50, 50 * 900, (), 50), StepShape(200, 200 * 400, (), 200),
    StepShape(0, 0, ((0, 300),), 1), StepShape(0, 0, ((4096, 1024),), 0), StepShape(40, 40 * 1000, ((0, 200), (512, 272)), 41),
]  # fmt: skip


@pytest.mark.parametrize("hardware", ["H100", "A100"])
def test_steps_put_together_are_those_predicted_whole(hardware: str) -> None:
    """By the device alone, where what is between the counts that were predicted shows."""
    found = costs(hardware)
    for shape in SHAPES:
        time = found.whole(shape).time
        assert time is not None
        assert found.seconds(shape) == pytest.approx(time.device_seconds, rel=0.1), shape
    eager = costs(hardware, graphs=False)
    for shape in SHAPES[:3]:
        time = eager.whole(shape).time
        assert time is not None and eager.seconds(shape) == pytest.approx(time.step_seconds, rel=0.05)


def test_a_step_reads_the_pages_that_its_sequences_hold() -> None:
    found = costs("H100")
    assert found.token_bytes == 4 * 2 * 4 * 128 * 2
    step = served_step(found.trace, StepShape(3, 3000, ((64, 32),), 4), 1000)
    paged = [op for op in step.ops() if op.name == PAGED]
    assert len(paged) == 4 and all(op.inputs[1].spec.shape == (3, 4, 1000, 128) for op in paged)
    assert paged[0].inputs[1].spec == generating(layers_of_attention(found.trace)[0], 3, 1000).key
    pieces = [op for op in step.ops() if "flash_attention" in op.name]
    assert len(pieces) == 4 and pieces[0].inputs[0].spec.shape == (1, 16, 32, 128) and pieces[0].inputs[1].spec.shape == (1, 4, 96, 128)
    longer = [found.seconds(StepShape(8, 8 * context, (), 8)) for context in (100, 1000, 10_000)]
    assert longer == sorted(longer) and longer[2] > longer[0]


def test_bytes_add_up_and_a_load_is_answered() -> None:
    asked = ServingAsked(
        model="llama3-1b", hardware="H100", overrides=SIZES, pages=2048, running=12, tokens=256, graphs=True,
        load=load_of("rate=20, in=300±100, out=60"), limit=Limit(ttft=0.2, tpot=0.02), seconds=5.0,
    )  # fmt: skip
    found = forecast(asked)
    assert found.verdict == "fits" and found.pages_bytes == 2048 * 16 * found.token_bytes
    assert found.weights_bytes + found.pages_bytes + found.step_bytes + found.context_bytes == found.device_bytes
    assert 0 < found.step_bytes < 2**30
    assert found.load is not None and found.load.requests > 70 and found.load.refused == 0 and found.load.inside > 0.95
    assert found.capacity_rate is not None and found.capacity_rate > 20 and found.dollars_per_million is not None
    assert [one.generating for one in found.steps] == [1, 8, 12, 0]
    tight = forecast(ServingAsked(model="llama3-1b", hardware="H100", overrides=SIZES, pages=700_000))
    assert tight.verdict == "no" and tight.device_bytes > tight.capacity_bytes and tight.load is None


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "llama3-1b", *(part for name, value in SIZES.items() for part in ("--set", f"{name}={value}"))]
    assert main([*words, "--on", "H100", "--load", "users=4, in=200, out=30", "--slo", "tpot=1s"]) == 0
    said = capsys.readouterr().out
    assert "FITS" in said and "launches replayed" in said and "100% keep tpot=1s" in said and "per million generated tokens" in said
    assert main([*words, "--on", "H100", "--pages", "700000", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["forecast"]["verdict"] == "no"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--load", "rate=1, in=1, out=1"], "add --on HW"), (["--on", "H100:8"], "predicted for one"), (["--on", "cpu"], "is a CPU"),
        (["--on", "H100", "--slo", "ttft=1s"], "none is given"), (["--on", "H100", "--load", "x"], "says nothing"), (["--on", "H9"], "H9"),
        (["--on", "H100", "--load", "rate=1, in=1, out=1", "--slo", "ttft=1"], "is no limit"), (["--on", "H100", "--dtype", "int1"], "--dtype int1"),
    ],
)  # fmt: skip
def test_what_cannot_be_foretold_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "gpt2", *words]) == 2
    assert told in capsys.readouterr().err
