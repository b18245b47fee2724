"""Weights in from elsewhere and out to elsewhere: held against safetensors and transformers themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretell.checkpoint import store
from foretell.checkpoint.pretrained import INDEX, load_into
from foretell.cli import main
from foretell.errors import FileFormatError, UserError
from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.runtime.train.run import run

safetensors = pytest.importorskip("safetensors.torch")
QWEN = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip
PLAN = Plan(
    model={"model": "hf:qwen2", "overrides": QWEN, "seq": 8}, hardware="CPU", micro_batch=2, precision="fp32",
    optimizer="adamw-foreach",
)  # fmt: skip


class Net(nn.Module):
    """Two names for one tensor, a buffer that is kept and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 3)
        self.tail = nn.Linear(4, 3, bias=False)
        self.tail.weight = self.head.weight
        self.register_buffer("scale", torch.ones(2), persistent=False)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def written(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    safetensors.save_file({name: value.clone().contiguous() for name, value in tensors.items()}, path)
    return path


def equal(model: nn.Module, wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


# ---------------------------------------------------------------- in


def test_a_safetensors_file_is_loaded_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    other, mine = Net(), Net()
    other.body[1].running_mean += 3
    path = written(tmp_path / "w.safetensors", state(other))
    report = load_into(mine, path)
    assert equal(mine, state(other)) and mine.tail.weight is mine.head.weight
    assert not report.missing and not report.left_over and len(report.matched) == 9
    assert report.lines() == [f"9 tensors from {path}"]


def test_names_dtypes_ties_and_what_is_left_are_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    other, mine = Net(), Net()
    given = {f"model.{name}": value.to(torch.bfloat16) if value.is_floating_point() else value for name, value in state(other).items()}
    del given["model.tail.weight"], given["model.body.1.num_batches_tracked"]
    given["model.lm_head.weight"] = torch.zeros(2)
    report = load_into(mine, written(tmp_path / "w.safetensors", given))
    assert torch.equal(mine.tail.weight, other.head.weight.to(torch.bfloat16).float())
    assert report.left_over == ("model.lm_head.weight",) and report.prefix == "their names without 'model.'"
    assert report.cast == {"bfloat16 to float32": 8} and report.built == ("body.1.num_batches_tracked",)
    bare = {name.removeprefix("body."): value for name, value in state(other.body).items()}
    wrapped = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))})
    report = load_into(wrapped, written(tmp_path / "b.safetensors", bare))
    assert report.prefix == "their names after 'body.'" and equal(wrapped["body"], state(other.body))


def test_what_does_not_fit_is_told_and_nothing_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    other, mine = Net(), Net()
    before, given = state(mine), state(other)
    wrong = {**given, "head.weight": torch.zeros(5, 4), "tail.weight": torch.zeros(5, 4)}
    with pytest.raises(UserError, match=r"nothing was loaded: head.weight is 3x4 in the model and head.weight is 5x4"):
        load_into(mine, written(tmp_path / "a.safetensors", wrong))
    less = {name: value for name, value in given.items() if not name.startswith("body.0")}
    with pytest.raises(UserError, match=r"2 tensors of the model are not there: body.0.weight, body.0.bias.*--init-missing body"):
        load_into(mine, written(tmp_path / "b.safetensors", less))
    with pytest.raises(UserError, match=r"head.weight and tail.weight are one tensor in the model and differ"):
        load_into(mine, written(tmp_path / "c.safetensors", {**given, "tail.weight": torch.zeros(3, 4)}))
    with pytest.raises(UserError, match=r"no tensor of .* has a name that the model knows"):
        load_into(mine, written(tmp_path / "d.safetensors", {"x.y": torch.zeros(2)}))
    ints = {**given, "body.0.bias": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(UserError, match=r"body.0.bias is 4 in the model and body.0.bias is 4 int64"):
        load_into(mine, written(tmp_path / "e.safetensors", ints))
    assert equal(mine, before)
    report = load_into(mine, tmp_path / "b.safetensors", may_miss=["body.0"])
    assert report.missing == ("body.0.weight", "body.0.bias") and torch.equal(mine.head.weight, other.head.weight)
    assert torch.equal(mine.body[0].weight, before["body.0.weight"]) and "2 not in it, kept as built" in report.lines()[1]


def test_files_that_are_cut_or_lie_are_refused(tmp_path: Path) -> None:
    mine = Net()
    before = state(mine)
    raw = written(tmp_path / "w.safetensors", state(Net())).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    bad = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    far = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}).encode()
    for content in (
        b"", raw[:5], raw[:100], raw[:-1], raw + b"x", b"\xff" * 8 + raw[8:], len(bad).to_bytes(8, "little") + bad,
        len(far).to_bytes(8, "little") + far, raw[:8] + b"[" + raw[9:], raw[: 8 + length],
    ):  # fmt: skip
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(FileFormatError):
            load_into(mine, tmp_path / "x.safetensors")
    assert equal(mine, before)
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError):
            load_into(mine, path)


def test_a_folder_with_an_index_must_be_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    other, mine = Net(), Net()
    names = list(state(other))
    places = {name: f"model-0000{1 + (number > 3)}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        written(tmp_path / file, {name: state(other)[name] for name in names if places[name] == file})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    load_into(mine, tmp_path)
    assert equal(mine, state(other))
    fresh = Net()
    before = state(fresh)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**places, "more": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(FileFormatError, match="names more, which no file has"):
        load_into(fresh, tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**places, names[0]: "../w.safetensors"}}))
    with pytest.raises(FileFormatError, match="which is no file of the folder"):
        load_into(fresh, tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileFormatError, match=r"model-00001-of-00002\.safetensors is missing"):
        load_into(fresh, tmp_path)
    assert equal(fresh, before)


# ---------------------------------------------------------------- out, and in again


class Quiet:
    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, text: str, step: int) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)


def go(out: Path, **asked: Any) -> Quiet:
    screen = Quiet()
    run(PLAN, {"steps": 2, "warmup": 0, "schedule": "constant", **asked}, screen=screen, out=out, device="cpu")
    return screen


def test_to_transformers_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train, convert, open with transformers itself; begin another run from that, and from the run's own checkpoint."""
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    go(tmp_path / "a")
    for words in ([], ["--shard", "20KB"], ["--dtype", "bfloat16"]):
        out = tmp_path / f"hf{len(list(tmp_path.iterdir()))}"
        assert main(["ckpt", "convert", str(tmp_path / "a"), str(out), *words]) == 0
        assert ((out / INDEX).exists()) == (words[:1] == ["--shard"])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        reader_model = store.complete(tmp_path / "a" / "checkpoints")[0]
        from foretell.checkpoint.read import Reader

        reader = Reader(reader_model)
        for name, value in theirs.named_parameters():
            wanted = reader.whole(f"model/{name}")
            assert torch.equal(value, wanted.to(torch.bfloat16).float() if words[:1] == ["--dtype"] else wanted), name
        assert theirs.config.architectures == ["Qwen2ForCausalLM"]
    capsys.readouterr()
    assert main(["ckpt", "convert", str(tmp_path / "a"), str(out)]) == 2 and "is there already" in capsys.readouterr().err
    first = go(tmp_path / "b", init_from=str(tmp_path / "hf1"))
    own = go(tmp_path / "c", init_from=str(tmp_path / "a"))
    rows = [[json.loads(line) for line in (tmp_path / one / "log.jsonl").read_text().splitlines()] for one in "abc"]
    start = [next(row["loss"] for row in some if row["event"] == "step") for some in rows]
    assert start[1] == start[2] != start[0]
    assert "tensors from" in first.said[0] and "tensors from" in own.said[0]


def test_init_from_is_checked_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans.write(PLAN, tmp_path / "plan.json")
    words = ["run", str(tmp_path / "plan.json"), "--out", str(tmp_path / "a"), "--device", "cpu", "--steps", "1"]
    assert main([*words, "--init-from", str(tmp_path / "none")]) == 2 and "there is nothing at" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main([*words, "--mtbf", "soon"]) == 2 and "not a length of time" in capsys.readouterr().err
    assert main([*words, "--mtbf", "4h", "--save-every", "3"]) == 2 and "give one of the two" in capsys.readouterr().err
    assert main([*words, "--keep", "0"]) == 2 and "at least one checkpoint is kept" in capsys.readouterr().err
    (tmp_path / "w.bin").write_bytes(b"PK\x03\x04 and so on")
    assert main([*words, "--init-from", str(tmp_path / "w.bin")]) == 2 and "runs code" in capsys.readouterr().err
