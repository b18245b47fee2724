"""Adapters as files: peft's format both ways, merged weights, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretell.checkpoint import peft_files, store
from foretell.checkpoint.pretrained import offered
from foretell.cli import main
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Adapters, Plan
from foretell.runtime.parallel.adapted import base_digest, put_on
from foretell.runtime.train import merge as merging
from foretell.runtime.train.prepare import build
from tests.cpu_dist.test_checkpoint import go

TINY = {"layers": 2, "dim": 32, "heads": 4, "context": 16, "vocab_size": 256}
PLAN = Plan(
    model={"model": "gpt-tiny", "overrides": TINY, "seq": 16}, hardware="CPU", micro_batch=2, precision="fp32",
    adapters=Adapters(kind="dora", rank=3, alpha=6.0, train=("norm",)), base={"adapted": "nf4"},
)  # fmt: skip
HF = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 64}
LLAMA = PLAN.with_(
    model={"model": "hf:llama", "overrides": HF, "seq": 8}, base={},
    adapters=Adapters(rank=3, alpha=6.0, targets=("q_proj", "down_proj"), train=("lm_head",)),
)  # fmt: skip
SETTINGS: dict[str, Any] = {"steps": 3, "lr": 1e-2, "schedule": "constant", "warmup": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a 4-bit base."""
    out = tmp_path_factory.mktemp("adapters") / "run"
    go(0, 1, str(out), PLAN, SETTINGS)
    return out


@pytest.fixture(scope="module")
def adapter(run: Path) -> Path:
    out = run.parent / "adapter"
    assert main(["run", "ckpt", "convert", str(run), str(out), "--to", "peft"]) == 0
    return out


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert main(words) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "Traceback" not in said[0]
    return said[0]


def written(plan: Plan, path: Path) -> str:
    plans.write(plan, path)
    return str(path)


# ---------------------------------------------------------------- both ways


def test_an_adapter_comes_back_as_it_was_saved(run: Path, adapter: Path) -> None:
    assert PLAN.adapters is not None
    found = peft_files.read_adapter(adapter)
    assert (found.adapters.kind, found.adapters.rank, found.adapters.alpha) == ("dora", 3, 6.0)
    saved = {name.removeprefix("model/"): offer for name, offer in offered(run).items()}
    assert set(found.tensors) == set(saved)
    assert all(torch.equal(found.tensors[name].read(), saved[name].read()) for name in saved)
    model = build(PLAN, 0).model
    put_on(model, PLAN, found)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == saved.keys() and all(torch.equal(p, saved[name].read()) for name, p in trained.items())


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_peft_reads_what_is_written_and_is_read(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    assert LLAMA.adapters is not None
    plan = LLAMA.with_(adapters=Adapters(kind=kind, rank=3, alpha=6.0, targets=("q_proj", "down_proj"), train=("lm_head",)))
    go(0, 1, str(tmp_path / "run"), plan, SETTINGS)
    saved = store.look(store.resolve(tmp_path / "run"))
    assert plan.adapters is not None
    peft_files.write_adapter(saved, tmp_path / "ours", plan.adapters)
    workload = build(plan, 0)
    theirs = peft.PeftModel.from_pretrained(build(plan, 0).model, str(tmp_path / "ours"))
    put_on(workload.model, plan, peft_files.read_adapter(tmp_path / "ours"))
    batch: Any = workload.batch
    expected = workload.model(**batch).logits
    assert torch.equal(theirs(**batch).logits, expected)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = build(plan, 0)
    back = peft_files.read_adapter(tmp_path / "theirs")
    assert (back.adapters.kind, back.adapters.rank, back.adapters.alpha) == (kind, 3, 6.0)
    put_on(again.model, plan, back)
    assert torch.equal(again.model(**batch).logits, expected)


def test_a_run_begins_with_an_adapter(run: Path, adapter: Path, tmp_path: Path) -> None:
    go(0, 1, str(tmp_path / "next"), PLAN, {**SETTINGS, "steps": 1, "lr": 1e-30, "init_adapter": str(adapter)})
    first, last = offered(tmp_path / "next"), offered(run)
    for name, offer in first.items():
        torch.testing.assert_close(offer.read(), last[name].read(), rtol=0, atol=1e-7)


# ---------------------------------------------------------------- merged


def trained_model(run: Path, plan: Plan) -> nn.Module:
    model = build(plan, 0).model
    put_on(model, plan)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, offer in offered(run).items():
            parameters[name].copy_(offer.read())
    return model.eval()


def test_merged_weights_compute_what_was_trained(run: Path, tmp_path: Path) -> None:
    batch: Any = build(PLAN, 0).batch
    tokens = batch[0] if isinstance(batch, tuple) else next(iter(batch.values())) if isinstance(batch, dict) else batch
    expected = trained_model(run, PLAN)(tokens)
    off = {}
    saved = store.look(store.resolve(run))
    for base in ("dequantised", "requantised", "original"):
        told = merging.merge(saved, tmp_path / base, base=base, dtype="float32")
        assert len(told.layers) == 8 and told.base == base
        plain = build(PLAN, 0).model.eval()
        weights = {name: offer.read() for name, offer in offered(tmp_path / base).items()}
        plain.load_state_dict(weights)
        with torch.no_grad():
            off[base] = float((plain(tokens) - expected).norm() / expected.norm())
        if base == "dequantised":
            assert max(one.error for one in told.layers) < 1e-4
        else:
            assert min(one.error for one in told.layers) > 0.01
    assert off["dequantised"] < 1e-5 < 1e-3 < min(off["requantised"], off["original"])


def test_merging_says_what_is_lost_and_twice_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "whole")
    assert main(["run", "ckpt", "merge", str(run), out]) == 0
    said = capsys.readouterr().out
    assert said.startswith("merged into the dequantised base: 8 layers") and "lost: what the merged weight is off" in said
    assert "is there already" in refused(["run", "ckpt", "merge", str(run), out], capsys)
    again = refused(["run", "ckpt", "merge", str(run), str(tmp_path / "b"), "--init-from", out], capsys)
    assert "were trained on another base" in again
    assert "one of original, dequantised" in refused(["run", "ckpt", "merge", str(run), str(tmp_path / "b"), "--base", "own"], capsys)
    go(0, 1, str(tmp_path / "plain"), PLAN.with_(adapters=None, base={}), SETTINGS)
    assert "it is merged already" in refused(["run", "ckpt", "merge", str(tmp_path / "plain"), str(tmp_path / "c")], capsys)
    assert "has no adapters" in refused(["run", "ckpt", "convert", str(tmp_path / "plain"), str(tmp_path / "c"), "--to", "peft"], capsys)
    assert "--to peft" in refused(["run", "ckpt", "convert", str(run), str(tmp_path / "c")], capsys)


# ---------------------------------------------------------------- bad input


def changed(adapter: Path, out: Path, **config: Any) -> Path:
    """The same adapter with other settings."""
    out.mkdir()
    known = json.loads((adapter / peft_files.CONFIG).read_text()) | config
    (out / peft_files.CONFIG).write_text(json.dumps(known))
    (out / peft_files.WEIGHTS).write_bytes((adapter / peft_files.WEIGHTS).read_bytes())
    return out


def test_foreign_and_damaged_adapters_are_refused(adapter: Path, tmp_path: Path) -> None:
    def why(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            peft_files.read_adapter(path)
        assert caught.value.remedy
        return caught.value.problem

    assert "is no adapter of peft" in why(tmp_path)
    assert "'IA3'" in why(changed(adapter, tmp_path / "kind", peft_type="IA3"))
    assert "use_dora and use_rslora" in why(changed(adapter, tmp_path / "both", use_rslora=True))
    assert "has bias all" in why(changed(adapter, tmp_path / "bias", bias="all"))
    assert "lacks r or lora_alpha" in why(changed(adapter, tmp_path / "alpha", lora_alpha="much"))
    for name, content in (("json", "{"), ("list", "[]"), ("deep", "[" * 100_000)):
        broken = changed(adapter, tmp_path / name)
        (broken / peft_files.CONFIG).write_text(content)
        assert "cannot be read" in why(broken)
    short = changed(adapter, tmp_path / "short")
    (short / peft_files.WEIGHTS).write_bytes((adapter / peft_files.WEIGHTS).read_bytes()[:-100])
    assert "has another size than it says" in why(short)
    pickled = changed(adapter, tmp_path / "pickled")
    (pickled / peft_files.WEIGHTS).rename(pickled / "adapter_model.bin")
    assert "has no adapter_model.safetensors" in why(pickled)


def test_an_adapter_of_another_model_or_base_is_refused(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(plan: Plan, where: Path = adapter, *more: str) -> str:
        path = written(plan, tmp_path / "plan.json")
        return refused(["run", path, "--init-adapter", str(where), "--out", str(tmp_path / "out"), "--steps", "1", *more], capsys)

    assert "has rank 3 and the plan has 4" in said(PLAN.with_(adapters=Adapters(kind="dora", rank=4, alpha=6.0, train=("norm",))))
    assert "has kind dora and the plan has lora" in said(PLAN.with_(adapters=Adapters(rank=3, alpha=6.0)))
    assert "is for another model or other targets: it lacks" in said(PLAN.with_(model={**PLAN.model, "overrides": {**TINY, "layers": 3}}))
    assert "there and" in said(PLAN.with_(model={**PLAN.model, "overrides": {**TINY, "dim": 64}}))
    assert "is for another base" in said(PLAN, adapter, "--seed", "9")
    assert "the plan trains no adapters" in said(PLAN.with_(adapters=None, base={}))


@pytest.mark.parametrize(
    ("adapters", "base", "said"),
    [
        (Adapters(rank=3, targets=("qvk",)), {}, "the target 'qvk' names no linear layer of the model; try: did you mean qkv?"),
        (Adapters(rank=33), {}, "rank 33 is above the size of 'blocks.0.attention.qkv', 96 × 32"),
        (Adapters(rank=3, train=("nrom",)), {}, "'nrom', which is to be trained whole, names no module of the model; try: did you mean norm"),
        (Adapters(rank=3, train=("blocks.0",)), {}, "is trained whole and 'blocks.0.attention.qkv' in it gets an adapter"),
        (Adapters(rank=3), {"gate": "nf4"}, "the base 'gate' names no linear layer with an adapter"),
        (None, {"adapted": "nf4"}, "is nf4 and the plan has no adapters: weights in that format are not trained"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_trained_are_refused(
    adapters: Adapters | None, base: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(PLAN.with_(adapters=adapters, base=base), tmp_path / "plan.json")
    assert said in refused(["run", path, "--out", str(tmp_path / "out"), "--steps", "1"], capsys)


def test_a_plan_file_with_strange_adapters_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = plans.to_json(PLAN)
    for change, said in (
        ({"adapters": {"kind": "lora"}}, "rank"), ({"adapters": {"kind": "ia3", "rank": 2}}, "ia3"),
        ({"adapters": {"kind": "lora", "rank": 0}}, "rank"),
        ({"adapters": {"kind": "lora", "rank": 2, "alpha": 0}}, "alpha"), ({"base": {"adapted": "fp4"}}, "fp4"),
        ({"adapters": {"kind": "lora", "rank": 2, "dropout": 1}}, "dropout"), ({"adapters": {"kind": "lora", "rank": 2, "own": 1}}, "own"),
    ):  # fmt: skip
        (tmp_path / "plan.json").write_text(json.dumps({**plain, **change}))
        assert said in refused(["plan", "show", str(tmp_path / "plan.json")], capsys)


def test_adapters_are_not_taken_for_weights(run: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(PLAN.with_(adapters=Adapters(rank=3), base={}), tmp_path / "plan.json")
    for given in (run, adapter):
        said = refused(["run", path, "--init-from", str(given), "--out", str(tmp_path / "out"), "--steps", "1"], capsys)
        assert "has adapters and not the weights of a model" in said
    assert main(["run", "ckpt", "show", str(run)]) == 0
    assert "DoRA rank 3, norm trained whole, base in nf4; the weights they are for are not in it" in capsys.readouterr().out


def test_a_digest_changes_with_any_tensor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 50), nn.Linear(50, 3))
    before = base_digest(model)
    assert base_digest(model) == before
    for parameter in model.parameters():
        with torch.no_grad():
            parameter[-1] += 1
        assert base_digest(model) != before
        before = base_digest(model)
