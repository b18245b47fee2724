"""Adapters asked for, planned and predicted: options, plans, searches, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell import api
from foretell.cli import main
from foretell.errors import UserError
from foretell.options.adapters import adapters_of
from foretell.plan import default, file, recipe
from foretell.plan.facts import Facts
from foretell.plan.legal import complaints
from foretell.plan.types import Adapters, Mesh, Pipeline, Plan, Residency
from foretell.trace.recipe import Recipe, adapters_told
from tests.kept_traces import with_traces

OWN = Adapters(kind="rslora", rank=4, alpha=12.0, dropout=0.1, targets=("qkv",), train=("norm",))
PLAN = Plan(model={"model": "gpt-tiny"}, hardware="H100", adapters=OWN, base={"adapted": "nf4", "qkv": "nf4-double"})
SMALL: dict[str, Any] = {"seq": 64, "overrides": {"layers": 2}}


def test_a_plan_file_says_adapters(tmp_path: Path) -> None:
    file.write(PLAN, tmp_path / "plan.json")
    assert file.read(tmp_path / "plan.json") == PLAN
    said = json.loads((tmp_path / "plan.json").read_text())
    assert said["adapters"] == {"kind": "rslora", "rank": 4, "alpha": 12.0, "dropout": 0.1, "targets": ["qkv"], "train": ["norm"]}
    assert "adapters" not in file.to_json(PLAN.with_(adapters=None, base={}))


def test_a_recipe_is_what_the_plan_trains_and_back() -> None:
    asked = recipe.recipe_of(PLAN)
    assert asked.adapters == OWN and asked.base == (("adapted", "nf4"), ("qkv", "nf4-double")) and asked.lora == 4 and asked.nf4
    again = default.default_plan(asked, PLAN.model, "H100")
    assert (again.adapters, again.base) == (PLAN.adapters, PLAN.base) and not default.in_no_plan(asked)
    assert Recipe.from_json(json.loads(json.dumps(asked.to_json()))) == asked
    short = Recipe(lora=8, nf4=True)
    assert short == Recipe(adapters=Adapters(rank=8), base=(("adapted", "nf4"),)) and not {"adapters", "base"} & short.to_json().keys()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mesh": Mesh(tp=2)}, "base"), ({"mesh": Mesh(tp=2), "base": {}, "adapters": replace(OWN, kind="dora")}, "adapters"),
        ({"mesh": Mesh(tp=2), "base": {}}, ""), ({"mesh": Mesh(tp=2), "base": {}, "compile": "blocks"}, "compile"),
        ({"mesh": Mesh(dp_shard=2, cp=2)}, ""), ({"mesh": Mesh(dp_shard=2, ep=2)}, "adapters"),
        ({"mesh": Mesh(pp=2), "pipeline": Pipeline(schedule="1f1b", cuts=("blocks.1",)), "accumulate": 2}, ""),
        ({"states": {"blocks.*": "host"}}, "adapters"),
        ({"adapters": None}, "base['adapted']"), ({"base": {"qkv": "int3"}}, "base['qkv']"),
        ({"precision": "bf16", "mesh": Mesh(dp_shard=2)}, "adapters.train"), ({"mesh": Mesh(dp_shard=2)}, ""),
        ({"blocks": {"blocks.*": Residency(mode="host")}}, ""), ({"compile": "model"}, ""),
    ],
)  # fmt: skip
def test_what_adapters_do_not_go_with_is_refused(change: dict[str, Any], field: str) -> None:
    found = complaints(PLAN.with_(**change), Facts(blocks=("blocks.0", "blocks.1")))
    assert [one.field for one in found] == ([field] if field else []), found


def test_options_say_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"lora": 4, "adapter": "rslora", "lora_alpha": 12.0, "lora_dropout": 0.1, "lora_targets": ("qkv",), "lora_train": ("norm",)}
    found = adapters_of({**given, "base": ("nf4", "qkv=nf4-double")})
    assert (found["adapters"], dict(found["base"])) == (PLAN.adapters, PLAN.base)
    assert adapters_told(OWN, PLAN.base) == "rsLoRA rank 4 on qkv, norm trained whole, base in nf4, nf4-double for qkv"
    for words, said in (
        (["--adapter", "dora"], "--adapter is given without adapters; try: add --lora RANK"),
        (["--lora", "4", "--adapter", "ia3"], "unknown kind of adapter 'ia3'"), (["--lora", "0"], "lora must be positive, got 0"),
        (["--lora", "4", "--base", "fp4"], "unknown format of the base of the adapted layers 'fp4'"),
        (["--nf4"], "nf4 needs LoRA adapters: a 4-bit base cannot be trained"),
        (["--base", "int8"], "int8 needs LoRA adapters: a base in it cannot be trained"),
        (["--lora", "4", "--nf4", "--base", "nf4-double"], "--nf4 and --base are given together"),
        (["--lora", "4", "--lora-dropout", "1"], "dropout of adapters is 1.0, not a share"),
        (["--lora", "4", "--lora-alpha", "inf"], "alpha of adapters is inf"),
    ):
        for command in ("fit", "plan"):
            assert main([command, "gpt2", "--on", "H100", *words]) == 2
            line = capsys.readouterr().err.strip()
            assert said in line and line.startswith("error: ") and "\n" not in line
    for words, said in (
        (["--lora", "4", "--ep", "2"], "--ep 2 and adapters are asked for"),
        (["--lora", "4", "--nf4", "--tp", "2"], "--tp 2 and a packed base are asked for"),
        (["--lora", "4", "--adapter", "dora", "--tp", "2"], "--tp 2 and dora are asked for"),
        (["--may", "magic"], "'magic' is not known; try: known: adapters"),
        (["--lora", "4", "--precision", "bf16-master"], "bf16-master does not go with adapters"),
    ):  # fmt: skip
        assert main(["plan", "gpt2", "--on", "H100:2", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One cache for the predictions here: they share their traces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_CACHE", str(with_traces(tmp_path_factory.mktemp("cache"))))
        yield


@pytest.mark.usefixtures("_kept")
def test_what_is_predicted_is_the_plan_that_would_run() -> None:
    """`fit` and `plan` of the same step say the same bytes, and the plan of `fit` has the adapters."""
    given = {**SMALL, "lora": 4, "base": ("nf4-double",), "clip": 1.0}
    answer = api.fit("gpt2", hardware="RTX4090", **given, advice_seconds=0)
    shown = file.from_json(answer.plan)
    assert shown.adapters == Adapters(rank=4) and shown.base == {"adapted": "nf4-double"}
    planned = api.plan("gpt2", hardware="RTX4090", **given, global_batch=1, compile="none").plan
    assert planned is not None and planned.adapters == shown.adapters and planned.base == shown.base
    assert planned.predicted["allocated_bytes"] == answer.memory.allocated_bytes
    plain = api.fit("gpt2", hardware="RTX4090", **{**given, "base": ("nf4",)}, advice_seconds=0)
    weights = sum(12 * 768 * 768 for _ in range(2))
    saved = plain.memory.categories["parameters"] - answer.memory.categories["parameters"]
    assert saved == pytest.approx(weights * (4 - 1) / 64, rel=0.02)  # a scale takes one byte and not four; small ones stay, and are rounded up


@pytest.mark.usefixtures("_kept")
def test_shards_of_a_base_in_four_bits_are_predicted() -> None:
    """Bytes of packed weights are shared; they are never fp32, whatever else of the shards is."""
    one, two = (
        api.fit("gpt2", hardware=on, **SMALL, lora=4, nf4=True, advice_seconds=0).memory.categories["parameters"] for on in ("H100", "H100:2")
    )  # fmt: skip
    assert two == pytest.approx(one / 2, rel=0.02)


@pytest.mark.slow(reason="adapters that are asked for are planned by the same search above")
@pytest.mark.usefixtures("_kept")
def test_adapters_are_offered_where_nothing_else_fits() -> None:
    asked: dict[str, Any] = {**SMALL, "hardware": "RTX4090", "global_batch": 1, "compile": "none", "clip": 1.0}
    usual = api.plan("gpt2", **asked, may=("adapters",)).plan
    assert usual is not None and usual.adapters is None
    found = api.plan("gpt2", **asked, hbm=1300 * 2**20, may=("adapters",))
    assert found.plan is not None and found.plan.adapters == Adapters(rank=16) and found.choice is not None
    assert any("another function" in note for note in found.choice.notes)
    nothing = api.plan("gpt2", **asked, hbm=600 * 2**20, may=("adapters",))
    assert nothing.plan is None and "short on" in nothing.why and nothing.choice is not None
    assert any("over a base in 4 bits neither" in note for note in nothing.choice.notes)
    with pytest.raises(UserError, match="host"):
        api.plan("gpt2", **asked, hbm=600 * 2**20)
