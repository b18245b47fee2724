"""The Python API end to end: names traced in a child process, modules traced here, cache, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import foretell
from foretell import api
from foretell.errors import ModelError, UnknownName, UserError
from foretell.quantities import NO, Prediction

MINE = """
import torch
from torch import nn
import os, helper

def build(width=64):
    {body}
    return nn.Sequential(nn.Linear(64, helper.width(width)), nn.ReLU(), nn.Linear(helper.width(width), 8))

def batch(model, micro_batch):
    return (torch.randn(micro_batch, {features}),)

def loss(output, batch):
    return output.float().pow(2).mean()
"""


def write_model(folder: Path, body: str = "", features: int = 64, factor: int = 1) -> str:
    (folder / "helper.py").write_text(f"def width(w):\n    return {factor} * w\n")
    (folder / "mine.py").write_text(MINE.format(body=body or "pass", features=features))
    return f"{folder}/mine.py:build"


def small_gpt() -> tuple[nn.Module, dict]:
    from foretell.zoo.language import gpt

    model = gpt.build(vocab_size=512, context=64, layers=3, dim=64, heads=4)
    return model, gpt.batch(model, 2, 64, None)


def test_a_module_gives_the_same_answer_as_its_name(cache_dir: Path) -> None:
    from foretell.zoo.language import gpt

    sizes = {"vocab_size": 512, "context": 64, "layers": 3, "dim": 64, "heads": 4}
    named = foretell.fit("gpt2", hardware="H100", overrides=sizes, micro_batch=2, seq=64)
    model, batch = small_gpt()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for place in ("cpu", "meta"):
        given = foretell.fit(model.to(place), {k: v.to(place) for k, v in batch.items()}, loss=gpt.loss, hardware="H100")
        assert given.memory == named.memory
        assert given.parameters == named.parameters == sum(p.numel() for p in model.parameters())
    model, _ = small_gpt()
    foretell.fit(model, batch, loss=gpt.loss, hardware="H100")
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in model.parameters())
    assert set(before) == dict(model.named_parameters()).keys()


def test_cached_answer_is_the_same_and_follows_every_user_file(cache_dir: Path, tmp_path: Path) -> None:
    name = write_model(tmp_path)
    first = api.fit(name, hardware="A100", micro_batch=4)
    assert api.fit(name, hardware="A100", micro_batch=4) == first
    assert len(list((cache_dir / "traces").glob("*.json"))) == 1
    write_model(tmp_path, factor=2)  # only the imported helper changes
    assert api.fit(name, hardware="A100", micro_batch=4).parameters > first.parameters


def test_cached_answer_needs_no_torch(cache_dir: Path, tmp_path: Path) -> None:
    name = write_model(tmp_path)
    first = api.fit(name, hardware="A100", micro_batch=4)
    code = (
        "import sys, json; from foretell import api\n"
        f"answer = api.fit({name!r}, hardware='A100', micro_batch=4)\n"
        "assert 'torch' not in sys.modules\nprint(json.dumps(answer.to_json()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Prediction.from_json(json.loads(done.stdout)) == Prediction.from_json(json.loads(json.dumps(first.to_json())))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('no such width')", "no such width"),
        ("os.abort()", "os.abort ends the process"),
        pytest.param("os._exit(3)", "os._exit ends the process", marks=pytest.mark.slow(reason="a process that ends as the one above")),
    ],
)
def test_what_user_code_does_is_told_in_one_line(cache_dir: Path, tmp_path: Path, body: str, words: str) -> None:
    name = write_model(tmp_path, body)
    with pytest.raises((ModelError, foretell.errors.InternalError)) as caught:
        api.fit(name, hardware="A100")
    assert words in str(caught.value) and "mine.py:7" in str(caught.value)


def test_batch_that_does_not_match_the_model(cache_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"one step of .* 63.* batch is what forward"):
        api.fit(write_model(tmp_path, features=63), hardware="A100")


@pytest.mark.parametrize(
    "wrong",
    [{"micro_batch": 0}, {"seq": -1}, {"accumulate": 0}, {"lora": 0}, {"nf4": True}, {"optimizer": "adamx"}, {"precision": "fp8"}],
    ids=str,
)
def test_bad_options_are_refused_before_anything_is_traced(wrong: dict) -> None:
    with pytest.raises(UserError) as caught:
        api.fit("gpt2", hardware="A100", **wrong)
    assert caught.value.problem and caught.value.remedy


def test_module_without_batch_and_other_nonsense() -> None:
    with pytest.raises(UserError, match="batch"):
        api.fit(nn.Linear(2, 2), hardware="A100")
    with pytest.raises(UnknownName):
        api.fit("gpt22", hardware="A100")
    with pytest.raises(UnknownName):
        api.fit("gpt2", hardware="H1000")
    on_a_cpu = api.fit("gpt-tiny", hardware="generic-cpu")
    assert on_a_cpu.fits and on_a_cpu.mfu is None and on_a_cpu.memory.capacity_bytes > on_a_cpu.memory.device_bytes


def test_too_small_a_device_is_an_answer_not_an_error(cache_dir: Path) -> None:
    model, batch = small_gpt()
    from foretell.zoo.language import gpt

    roomy = api.fit(model, batch, loss=gpt.loss, hardware="H100")
    need = roomy.memory.device_bytes
    small = api.fit(model, batch, loss=gpt.loss, hardware=f"H100,memory={need - (64 << 20)}B")
    assert small.verdict == NO and not small.fits and small.memory.margin_bytes < 0
    assert roomy.fits and roomy.infeasible is None
    why = small.infeasible
    assert why is not None and why.device == "H100-SXM-80GB" and why.bytes_short == -small.memory.margin_bytes > 0
    assert why.holders == small.memory.holders and why.holders[0].bytes == max(holder.bytes for holder in why.holders)


def test_sharding_over_more_devices_never_needs_more_state(cache_dir: Path) -> None:
    from foretell.zoo.language import gpt

    model, batch = small_gpt()
    state = []
    for count in (2, 4, 8):
        held = api.fit(model, batch, loss=gpt.loss, hardware=f"H100:{count}").memory.categories
        state.append(held["parameters"] + held["optimizer"])
    assert state[0] > state[1] > state[2]


@pytest.mark.slow(reason="a real run beside a prediction; test_zoo_check.py and the zoo's tests do the same")
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "graphsage-tiny"])
def test_prediction_for_this_cpu_equals_a_real_run(name: str) -> None:
    torch.set_num_threads(1)
    done = api.check(name)
    assert done.ok
    assert done.predicted_bytes == pytest.approx(done.measured_bytes, rel=0.01)


def test_a_file_changed_within_a_second_is_read_anew(cache_dir: Path, tmp_path: Path) -> None:
    """Python takes bytecode for the file it was made from where time, in seconds, and size are the same."""
    name = write_model(tmp_path)
    first = api.fit(name, hardware="A100", micro_batch=4)
    before = {path: path.stat() for path in tmp_path.rglob("*.py")}
    write_model(tmp_path, factor=2)
    for path, stat in before.items():
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert api.fit(name, hardware="A100", micro_batch=4).parameters > first.parameters
