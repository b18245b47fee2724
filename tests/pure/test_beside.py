"""Jobs that share one GPU: alone as the one timeline says, together as a clock that ticks says, memory as a sum."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.price.occupancy import blocks, share
from foretell.price.speeds import Options
from foretell.quantities import COMPUTE, NO, TIGHT, Task
from foretell.simulate.beside import together
from foretell.simulate.plan import predict_step
from foretell.simulate.time.beside import Sharing, beside
from foretell.simulate.time.streams import simulate
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import request
from foretell.trace.store.traces import traced
from foretell.trace.types import Op, Ref, TensorSpec
from tests.further import one_in

TICK = 1e-5


def kernel(seconds: float, asking: float, synchronises: bool = False) -> Task:
    return Task("k", COMPUTE, seconds, (), asking, synchronises=synchronises)


def drawn(rng: random.Random, count: int, device: float, host: float) -> list[Task]:
    return [kernel(rng.uniform(0.2, 1.8) * device, rng.uniform(0.2, 1.8) * host, rng.random() < 0.05) for _ in range(count)]


BUSY = [kernel(1e-3, 1e-5) for _ in range(20)]
WAITING = [kernel(1e-5, 1e-4) for _ in range(100)]
FREE = Sharing(slice_seconds=2e-3, switch_seconds=0.0)


@pytest.mark.parametrize("seed", range(12))
def test_alone_it_is_the_timeline_of_a_step(seed: int) -> None:
    rng = random.Random(seed)
    tasks = drawn(rng, 40, rng.choice((1e-5, 1e-4, 1e-3)), rng.choice((1e-5, 1e-4)))
    assert beside([tasks]).step_seconds[0] == pytest.approx(simulate(tasks, steps=8).seconds, rel=1e-6)


def test_two_that_keep_the_device_busy_take_the_sum() -> None:
    found = beside([BUSY, BUSY], FREE)
    assert found.step_seconds == pytest.approx((0.04, 0.04), rel=1e-6) and found.busy == pytest.approx(1.0, rel=1e-3)
    slower = beside([BUSY, BUSY], Sharing(slice_seconds=2e-3, switch_seconds=1e-4))
    assert slower.step_seconds[0] == pytest.approx(0.04 * 2.1 / 2.0, rel=0.02), "every slice of 2 ms costs a switch of 0.1"


def test_unlike_jobs_have_the_device_half_each() -> None:
    """Ten times the kernels, ten times the time: slices are equal, whatever is in them."""
    long = [kernel(1e-3, 1e-5) for _ in range(200)]
    short, whole = beside([BUSY, long], FREE).step_seconds
    assert short == pytest.approx(0.04, rel=0.05) and whole == pytest.approx(0.4, rel=0.05)


def test_jobs_that_wait_for_their_hosts_slip_into_each_others_gaps() -> None:
    found = beside([WAITING, WAITING], FREE)
    assert found.step_seconds == pytest.approx((0.01, 0.01), rel=0.01) and found.busy == pytest.approx(0.2, rel=0.02)
    busy, waiting = beside([BUSY, WAITING], FREE).step_seconds
    assert waiting == pytest.approx(0.01, rel=0.05), "its host asks far ahead, so that a late kernel is made up for"
    assert busy == pytest.approx(0.02 / 0.9, rel=0.05), "the other has a tenth of the device"


def ticked(jobs: Sequence[Sequence[Task]], slice_seconds: float, until: float) -> list[float]:
    """The same by a clock: at every tick the process whose turn it is works, or gives its turn away."""
    state = [{"place": 0, "host": tasks[0].host_seconds, "left": tasks[0].seconds, "last": 0.0, "ends": []} for tasks in jobs]
    turn, used, now = 0, 0.0, 0.0
    while now < until:
        ready = [max(one["host"], one["last"]) <= now + 1e-12 for one in state]
        if not ready[turn] or used >= slice_seconds:
            others = [index for index in range(len(jobs)) if index != turn and ready[index]]
            if others:
                turn, used = others[0], 0.0
            elif used >= slice_seconds:
                used = 0.0
        if ready[turn]:
            one, tasks = state[turn], jobs[turn]
            one["left"] -= TICK
            used += TICK
            if one["left"] <= 1e-12:
                done = now + TICK
                one["last"] = done
                if tasks[one["place"]].synchronises:
                    one["host"] = max(one["host"], done)
                one["place"] += 1
                if one["place"] == len(tasks):
                    one["ends"].append(max(done, one["host"]))
                    one["place"] = 0
                one["host"] += tasks[one["place"]].host_seconds
                one["left"] = tasks[one["place"]].seconds
        now += TICK
    return [(one["ends"][-1] - one["ends"][1]) / (len(one["ends"]) - 2) for one in state]


@pytest.mark.parametrize("seed", one_in(3, range(8), "other numbers"))
def test_together_it_is_what_a_ticking_clock_says(seed: int) -> None:
    rng = random.Random(100 + seed)
    whole = [[replaced(task) for task in drawn(rng, 30, rng.choice((2e-4, 1e-3)), rng.choice((1e-4, 5e-4)))] for _ in range(2)]
    found = beside(whole, FREE).step_seconds
    assert found == pytest.approx(ticked(whole, FREE.slice_seconds, 3.0), rel=0.06)


def replaced(task: Task) -> Task:
    """In whole ticks."""
    return task._replace(seconds=max(1, round(task.seconds / TICK)) * TICK, host_seconds=round(task.host_seconds / TICK) * TICK)


# ---------------------------------------------------------------- memory


@functools.cache
def cost_of() -> Any:
    recipe = Recipe()
    trace, _ = traced(request(Source(model="gpt-tiny"), recipe, (9, 0), {}))
    return predict_step(trace, recipe, parse("H200"), Options(profile_of=find_profile))


def test_memory_adds_up_with_a_context_for_each() -> None:
    one = cost_of()
    found = together([one, one])
    memory = one.worst.memory
    assert found.device_bytes == 2 * memory.device_bytes and found.margin_bytes == memory.capacity_bytes - 2 * memory.device_bytes
    assert found.fits and found.slowdown is not None and all(slower >= 1 - 1e-9 for slower in found.slowdown)
    assert json.loads(json.dumps(found.to_json()))["verdict"] == found.verdict


def test_two_that_fit_alone_may_not_fit_together() -> None:
    one = cost_of()
    memory = replace(one.worst.memory, capacity_bytes=int(1.9 * one.worst.memory.device_bytes))
    small = replace(one, ranks=(replace(one.ranks[0], memory=memory),))
    assert together([small]).verdict != NO and together([small, small]).verdict == NO
    unsure = memory.bands["device_bytes"][1] - memory.device_bytes
    roomy = replace(memory, capacity_bytes=2 * memory.device_bytes + 2 * unsure + 1)
    assert together([replace(one, ranks=(replace(one.ranks[0], memory=roomy),))] * 2).verdict == TIGHT


# ---------------------------------------------------------------- utilisation


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten.mm.default", [(1024, 512)], 8 * 4), ("aten.bmm.default", [(6, 128, 64)], 6), ("aten.add.Tensor", [(1024, 100)], 100),
        ("aten._scaled_dot_product_flash_attention.default", [(2, 12, 1024, 64)], 2 * 12 * 8), ("aten.sum.default", [(), (2048,)], 2),
        ("aten.convolution.default", [(8, 64, 16, 16)], 16),
    ],
)  # fmt: skip
def test_thread_blocks(name: str, shapes: list[tuple[int, ...]], expected: int) -> None:
    refs = tuple(Ref(number, TensorSpec(shape, "bfloat16")) for number, shape in enumerate(shapes))
    op = Op(name, refs[1:], refs[:1], "", "forward", 0)
    assert blocks(op) == expected and share(op, 132) == min(1.0, expected / 132)


# ---------------------------------------------------------------- the command


def test_fit_beside(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fit", "gpt-tiny", "--on", "H200", "--beside", "resnet-tiny,micro_batch=4"]
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    both, use = answer["beside"], answer["utilisation"]
    assert both["each_bytes"][0] == answer["memory"]["device_bytes"] and sum(both["each_bytes"]) == both["device_bytes"]
    assert both["alone_seconds"][0] == pytest.approx(answer["time"]["step_seconds"])
    assert 0 < use["multiprocessors"] <= use["busy"] <= 1 and use["busy"] == pytest.approx(both["alone_busy"][0])
    assert main(asked) == 0
    assert "TOGETHER FIT" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["resnet-tiny,layers", "resnet-tiny,depth=3", "resnet-tiny,micro_batch=x"])
def test_what_is_no_job_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "gpt-tiny", "--on", "H200", "--beside", text]) == 2
    assert "MODEL,KEY=VALUE" in capsys.readouterr().err


def test_jobs_share_one_gpu_only() -> None:
    from foretell import api

    with pytest.raises(UserError, match="one GPU"):
        api.beside([{"model": "gpt-tiny"}], hardware="H200:2")
    with pytest.raises(UserError, match="no option"):
        api.beside([{"model": "gpt-tiny", "colour": "red"}], hardware="H200")


# ---------------------------------------------------------------- how slices are read from two kernels that watch the clock


def test_slices_and_switches_are_found_again() -> None:
    """Two processes in turn, 2 ms each, 0.1 ms between them; they begin and end at different times."""
    spec = importlib.util.spec_from_file_location("two_jobs", Path(__file__).resolve().parents[2] / "benchmarks" / "two_jobs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    turns = [(1_000_000 + number * 2_100_000, 3_000_000 + number * 2_100_000) for number in range(100)]
    first, second = [(0, turns[0][1]), *turns[2::2]], turns[1:-20:2]
    found = module.slices(first, second)
    assert found["slice_seconds"] == pytest.approx(2e-3) and found["switch_seconds"] == pytest.approx(1e-4)
    assert module.slices([(0, 10)], [(20, 30)])["slice_seconds"] is None
