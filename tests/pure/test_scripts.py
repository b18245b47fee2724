"""Training scripts, each followed as it is: the bytes of the file that trains the same, nothing left behind, and what is said of odd ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import ModelError, UserError
from foretell.lower.steps import repeated
from foretell.search.traces.child import trace_all
from foretell.simulate.memory.replay import peak_live
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import request as request_file
from foretell.trace.script import kept as stored
from foretell.trace.script.child import clear_stale, follow_in_child, request
from foretell.trace.script.words import parse
from foretell.trace.script.writes import Aside
from foretell.trace.store.file import loads
from foretell.trace.types import Trace

DATA = Path(__file__).resolve().parents[1] / "data"
SCRIPTS = DATA / "scripts"
FOUND: dict[str, dict[str, Any]] = {
    "gpt_scaler": {"precision": "fp16-autocast", "optimizer": "adamw", "clip": 1.0},
    "conv_ema": {"precision": "fp32", "optimizer": "momentum"},
    "accelerate_mlp": {"precision": "bf16-autocast", "optimizer": "adamw-fused", "accumulate": 2, "clip": 1.0},
    "accelerate_vit": {"precision": "bf16-autocast", "optimizer": "adamw", "accumulate": 2, "clip": 1.0},
    "recompute_hydra": {"precision": "bf16", "optimizer": "adamw", "clip": 0.5},
    "bert_dict": {"precision": "bf16-autocast", "optimizer": "adamw-fused"},
    "trainer_gpt2": {"precision": "bf16-autocast", "optimizer": "adamw-fused", "accumulate": 2, "clip": 1.0},
    "trainer_bert": {"precision": "fp16-autocast", "optimizer": "adamw-fused", "clip": 1.0},
    "lightning_mlp": {"precision": "bf16-autocast", "optimizer": "adamw", "accumulate": 2, "clip": 1.0},
    "lightning_images": {"precision": "fp16-autocast", "optimizer": "momentum"},
    "lightning_manual": {"precision": "fp32", "optimizer": "adam", "clip": 0.5},
    "lightning_fabric": {"precision": "bf16-autocast", "optimizer": "adamw", "accumulate": 2, "clip": 1.0},
    "trainer_t5": {"precision": "fp32", "optimizer": "adamw", "clip": 1.0},
    "trainer_vit": {"precision": "bf16-autocast", "optimizer": "adamw-fused", "accumulate": 3},
    "accelerate_glue": {"precision": "fp32", "optimizer": "adamw", "accumulate": 3},
    "accelerate_diffusion": {"precision": "fp16-autocast", "optimizer": "adamw", "clip": 1.0},
    "closure_pinn": {"precision": "fp32", "optimizer": "adam"},
    "timm_style": {"precision": "fp16-autocast", "optimizer": "momentum", "clip": 2.0},
    "gpt_compiled": {"precision": "bf16-autocast", "optimizer": "adamw-fused", "accumulate": 4, "clip": 1.0, "compile": "model"},
}
"""What each does, as its source says."""
AGAIN = {"trainer_bert", "recompute_hydra", "accelerate_diffusion"}
"""Whose blocks are computed again in backward."""


def zeroed_late(trace: Trace) -> Trace:
    """The same step with the gradients of the one before there until its backward begins."""
    ops = list(trace.programs["micro_first"].ops)
    last = max(place for place, op in enumerate(ops) if op.phase == "forward")
    gone = tuple(number for op in trace.programs["zero_grad"].ops for number in op.frees)
    ops[last] = replace(ops[last], frees=(*ops[last].frees, *gone))
    runs = {name: tuple(one for one in run if one[0] != "zero_grad") for name, run in trace.schedule.items()}
    return replace(trace, programs={**trace.programs, "micro_first": replace(trace.programs["micro_first"], ops=tuple(ops))}, schedule=runs)


def kept(trace: Trace) -> Trace:
    """The same step with the gradients of the one before there all the time: it adds to them."""
    again = repeated(trace, 2)
    first = tuple(one for one in again.schedule["first_step"] if one[0] in ("micro_first", "update_first"))
    return replace(again, resident=trace.resident, schedule={"first_step": first, "steady_step": (("micro_next", 1), ("update", 1))})


FURTHER = {
    **dict.fromkeys(("trainer_t5", "trainer_gpt2", "trainer_vit"), "another model under Trainer, as trainer_bert"),
    "accelerate_mlp": "accelerate is under Trainer too, which trainer_bert has",
    "lightning_fabric": "a loop of one's own, as bert_dict, in words of Lightning, as lightning_mlp",
    "lightning_manual": "a loop of one's own under Lightning, as lightning_mlp; what is left to the next step is left by bert_dict too",
    "lightning_images": "another model under Lightning, as lightning_mlp",
    **dict.fromkeys(("accelerate_glue", "accelerate_vit", "accelerate_diffusion"), "another model under accelerate"),
    "timm_style": "a plain loop with a gradient scaler, as gpt_scaler, which test_script_plans patches; it zeroes late, as bert_dict does",
    "conv_ema": "a plain loop; test_script_faster follows it with changes",
    "gpt_scaler": "a plain loop with a gradient scaler; test_script_plans follows and patches it",
}
"""Why a script is slow: what is like it."""
NAMES = [pytest.param(name, marks=pytest.mark.slow(reason=FURTHER[name])) if name in FURTHER else name for name in FOUND]

LEFT = {"bert_dict": zeroed_late, "recompute_hydra": zeroed_late, "timm_style": zeroed_late, "lightning_manual": kept}
"""What a step leaves to the next in scripts that do not free gradients after the update."""


@pytest.fixture(scope="module", autouse=True)
def as_they_were() -> Iterator[None]:
    """None of the scripts that are followed where they are leaves anything there."""

    def there() -> list[Path]:
        return sorted(one for one in SCRIPTS.rglob("*") if "__pycache__" not in one.parts)

    before = there()
    yield
    assert there() == before


def followed(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, list[str]]:
    monkeypatch.chdir(folder)
    text, reply = follow_in_child(request(parse(words), (9, 0), {}, False), time_limit=240)
    return loads(text), reply["notes"]


@pytest.fixture(scope="module")
def files(request: pytest.FixtureRequest) -> dict[str, Trace]:
    """What the functions of the file that train the same need, traced in one process; recomputation is in the models themselves but for one.

    Of the scripts that are asked for in this run of pytest.
    """
    asked = {item.callspec.params["name"] for item in request.session.items if item.path == request.path and "files" in item.fixturenames}
    wanted = {name: found for name, found in FOUND.items() if name in asked}
    again = {name: "full" if name == "trainer_bert" else "none" for name in wanted}
    file = DATA / "scripts_as_files.py"
    requests = [
        request_file(Source(model=f"{file}:{name}"), replace(Recipe(**found), compile="none", recompute=again[name]), (9, 0), {})
        for name, found in wanted.items()
    ]
    return {name: loads(text) for name, (text, _) in zip(wanted, trace_all(requests), strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_a_script_needs_what_the_file_that_trains_the_same_needs(name: str, files: dict[str, Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = followed(["python", f"{name}.py"], SCRIPTS, monkeypatch)
    assert Recipe.from_json(trace.meta["recipe"]) == Recipe(**FOUND[name])  # type: ignore[arg-type]
    other = LEFT.get(name, lambda trace: trace)(files[name])
    mine, theirs = (peak_live(one, tuple(one.schedule)) for one in (trace, other))
    assert abs(mine / theirs - 1) < 0.001
    assert trace.meta["trainable"] == other.meta["trainable"]
    assert any(op.phase == "recompute" for op in trace.ops()) == (name in AGAIN)


def test_optimizers_that_take_turns_make_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = followed(["python", "gan_turns.py"], SCRIPTS, monkeypatch)
    assert trace.schedule == {"first_step": (("micro_first", 1),), "steady_step": (("round", 1),)}
    for name in ("micro_first", "round"):
        updated = {op.module for op in trace.programs[name].ops if op.phase == "update"}
        assert updated and sum(op.phase == "backward" for op in trace.programs[name].ops) > 20
    held = sum(one.nbytes for one in trace.storages.values() if one.role == "optimizer" and not one.host)
    assert held == 2 * 4 * trace.meta["parameters"]  # type: ignore[operator]


def test_two_losses_of_one_forward_are_one_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient scaler that is made and not used, and an optimizer that no recipe has a name for, beside."""
    body = """
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.RMSprop(model.parameters())
for _ in range(10**9):
    out = model(torch.randn(4, 8).cuda())
    {first}
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = {}
    for kind, first in (("two", "out.sum().backward(retain_graph=True)"), ("one", "")):
        (tmp_path / "train.py").write_text(HEAD.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "") + body.format(first=first))
        trace, notes = followed(["python", "train.py"], tmp_path, monkeypatch)
        found[kind] = [op.name for op in trace.programs["micro_first"].ops if op.phase == "backward"]
        assert trace.meta["recipe"]["accumulate"] == 1 and "micro_next" not in trace.programs  # type: ignore[index]
        assert any("RMSprop" in note for note in notes)
    assert found["two"].count("aten.mm.default") == 2 * found["one"].count("aten.mm.default") > 0


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text((SCRIPTS / "conv_ema.py").read_text())
    _, notes = followed(["python", "train.py"], tmp_path, monkeypatch)
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]
    assert any("scratch folder" in note and "config.json" in note for note in notes)


def test_what_a_killed_one_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for owner in (gone.pid, os.getpid()):
        (tmp_path / f"foretell-script-{owner}-x" / "deep").mkdir(parents=True)
    (tmp_path / "foretell-script-notes").mkdir()
    clear_stale()
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([f"foretell-script-{os.getpid()}-x", "foretell-script-notes"])


HEAD = """
import os, sys, time, torch
from torch import nn
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
ODD = {
    "never steps": ("for _ in range(3):\n    model(torch.randn(4, 8).cuda()).sum().backward()\n", "ended before its first step"),
    "no backward": ("for _ in range(3):\n    model(torch.randn(4, 8).cuda())\n", "ended without backward"),
    "no model": ("print('hello')\n", "without a module that learns"),
    "leaves": ("sys.exit(3)\n", "left with exit(3)"),
    "ends its process": ("os._exit(0)\n", "os._exit ends the process (train.py:6"),
    "raises": ("model(torch.randn(4, 9).cuda())\n", "train.py"),
    "forks": ("os.fork()\n", "train.py:6 forks"),
    "network": ("import urllib.request\nurllib.request.urlopen('http://example.invalid')\n", "needs the network"),
    "missing file": ("open('data/none.txt')\n", "none.txt"),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_scripts_are_told_of_in_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, words = ODD[kind]
    (tmp_path / "train.py").write_text(HEAD + body)
    with pytest.raises(ModelError) as caught:
        followed(["python", "train.py"], tmp_path, monkeypatch)
    assert words in f"{caught.value.problem}\n{caught.value.detail}"
    assert "Traceback" not in caught.value.problem


def test_a_script_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(HEAD + "while True:\n    time.sleep(0.1)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="time limit"):
        follow_in_child(request(parse(["python", "train.py"]), (9, 0), {}, False), time_limit=2)


@pytest.mark.parametrize(
    ("words", "name", "arguments", "ranks"),
    [
        ("python train.py --lr 1", "train.py", ("--lr", "1"), 1), ("python3.11 -u -W ignore train.py", "train.py", (), 1),
        ("train.py a b", "train.py", ("a", "b"), 1), ("python -m json.tool x", "json.tool", ("x",), 1),
        ("torchrun --nproc-per-node 8 train.py --x", "train.py", ("--x",), 8),
        ("torchrun --nnodes=2 --nproc_per_node=4 --standalone train.py", "train.py", (), 8),
        ("torchrun --nproc-per-node gpu train.py", "train.py", (), 0),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py y", "train.py", ("y",), 2),
        ("accelerate launch --num_processes 4 --multi_gpu train.py -v", "train.py", ("-v",), 4),
    ],
)  # fmt: skip
def test_commands_are_read_as_a_shell_would_start_them(
    words: str, name: str, arguments: tuple[str, ...], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    script = parse(words.split())
    assert (script.name, script.arguments, script.ranks) == (name, arguments, ranks)


NO_SCRIPT = ("", "python", "python --version", "python none.py", "bash train.sh", "torchrun --nproc-per-node x train.py", "accelerate config")


@pytest.mark.parametrize("words", NO_SCRIPT)
def test_commands_that_start_no_script_are_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(UserError):
        parse(words.split())


def test_writes_go_aside_and_are_read_back(tmp_path: Path) -> None:
    """In a process of its own: the hook that refuses other writes stays."""
    home = tmp_path / "home"
    (home / "old").mkdir(parents=True)
    (home / "old" / "a.txt").write_text("a")
    (home / "b.txt").write_text("b")
    code = f"""
import os, shutil, pathlib
from foretell.trace.script.writes import Aside, kept_aside
os.chdir({str(home)!r})
with kept_aside(Aside({str(tmp_path / "scratch")!r})):
    os.makedirs("new/deep", exist_ok=True)
    pathlib.Path("new/deep/x.txt").write_text("x")
    assert pathlib.Path("new/deep/x.txt").read_text() == "x" and os.listdir("new") == ["deep"] and os.path.isdir("new")
    with open("b.txt", "a") as file: file.write("c")
    assert open("b.txt").read() == "bc"
    os.rename("b.txt", "c.txt")
    assert not os.path.exists("b.txt") and open("c.txt").read() == "bc"
    os.remove("c.txt")
    assert not os.path.exists("c.txt")
    shutil.rmtree("old")
    assert not os.path.exists("old/a.txt") and not os.path.exists("old")
    shutil.rmtree("new")
    try:
        os.unlink("a.txt", dir_fd=os.open("old", os.O_RDONLY))
        raise SystemExit("removed by handle")
    except OSError:
        pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2], env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert sorted(str(one.relative_to(home)) for one in home.rglob("*")) == ["b.txt", "old", "old/a.txt"]
    assert (home / "b.txt").read_text() == "b" and (home / "old" / "a.txt").read_text() == "a"


def test_twins_of_paths() -> None:
    aside = Aside("/scratch")
    assert aside.twin("/a/b") == "/scratch/a/b" and aside.twin("/dev/null") is None and aside.twin(3) is None and aside.twin("/scratch/x") is None


DEPENDS = """
import json, os, torch
from net import build
width = int(os.environ.get("WIDTH_OF_IT", json.load(open("settings.json"))["width"]))
print(sorted(os.listdir("data")), os.path.exists("resume.pt"))
model = build(width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, width).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "last.pt")
"""


def test_an_unchanged_script_is_not_followed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    Path("train.py").write_text(DEPENDS)
    Path("net.py").write_text("from torch import nn\nbuild = lambda n: nn.Linear(n, n)\n")
    Path("settings.json").write_text('{"width": 16}')
    Path("data").mkdir()
    times: list[str] = []
    monkeypatch.setattr(stored, "follow_in_child", lambda asked, **how: times.append("") or follow_in_child(asked, **how))

    def parameters(*words: str) -> Any:
        trace, reply = stored.followed(request(parse(["python", "train.py", *words]), (9, 0), {}, False))
        return trace.meta["parameters"], len(times), reply["micro_batch"]

    assert parameters() == (16 * 17, 1, 4)
    Path("unrelated.txt").write_text("nobody reads this")
    assert parameters() == (16 * 17, 1, 4)
    Path("settings.json").write_text('{"width": 24}')
    assert parameters() == (24 * 25, 2, 4)
    monkeypatch.setenv("WIDTH_OF_IT", "8")
    assert parameters() == (8 * 9, 3, 4)
    Path("net.py").write_text("from torch import nn\nbuild = lambda n: nn.Linear(n, n, bias=False)\n")
    assert parameters() == (8 * 8, 4, 4)
    Path("data", "new.txt").touch()
    assert parameters()[1] == 5
    Path("resume.pt").touch()
    assert parameters()[1] == 6
    assert parameters("--other", "words")[1] == 7
    Path("train.py").write_text(DEPENDS.replace("randn(4,", "randn(6,"))
    assert parameters() == (8 * 8, 8, 6)
    assert parameters() == (8 * 8, 8, 6)


LEAVES = """
import sys, torch
from torch import nn
how = sys.argv[1]
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.inference_mode():
    print(model(torch.randn(2, 256, device="cuda")).sum().item())
model(torch.zeros(1, 256, device="cuda"))
for _ in range(10):
    x = torch.randn(512, 256, device="cuda")
    out = model(x)
    loss = out.square().mean()
    if how == "late":
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if how in ("none", "evaluates"):
        optimizer.zero_grad()
    if how == "evaluates":
        with torch.no_grad():
            model(torch.randn(4096, 256, device="cuda")).mean().item()
    if how == "kept":
        optimizer.zero_grad(set_to_none=False)
    if how == "ends":
        break
"""


def test_what_a_step_leaves_to_the_next_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, and what the model returned; not a look at the model before, nor an evaluation between."""
    (tmp_path / "train.py").write_text(LEAVES)
    found = {how: followed(["python", "train.py", how], tmp_path, monkeypatch) for how in ("none", "evaluates", "late", "kept", "ends")}
    peaks = {how: peak_live(trace, tuple(trace.schedule)) for how, (trace, _) in found.items()}
    weights, rows = 8 * (256 * 256 + 256) * 4, 512 * 256 * 4
    forward = weights + 9 * rows  # weights, x and what each layer gives
    assert forward + 2 * rows < peaks["none"] < forward + 5 * rows  # backward begins: gradients of the square and of the last layer
    assert peaks["kept"] - peaks["none"] == weights
    assert 0 < peaks["late"] - (forward + weights + rows) < 8192  # the end of forward: the last layer's output beside that of the step before
    assert peaks["evaluates"] == peaks["none"]
    zeroed = [op for op in found["kept"][0].programs["again"].ops if op.name == "aten.zero_.default"]
    assert len(zeroed) == 16 and {op.phase for op in zeroed} == {"update"}
    assert any("only the first step" in note for note in found["ends"][1]) and "again" not in found["ends"][0].programs
    assert any("train.py" in note and "without gradients" in note for note in found["evaluates"][1])


@pytest.mark.slow(reason="imports transformers in a process of its own; a script under Trainer is followed above")
def test_what_a_hub_would_give_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is imported by the script; a folder with a configuration and no weights is enough for a model, which is in evaluation mode."""
    (tmp_path / "small").mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 200}
    (tmp_path / "small" / "config.json").write_text(json.dumps({"model_type": "bert", "dtype": "bfloat16", **sizes}))
    (tmp_path / "train.py").write_text("""
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model = AutoModelForSequenceClassification.from_pretrained("small", num_labels=7, attn_implementation="eager").cuda()
assert model.classifier.out_features == 7 and not model.training and model.dtype == torch.bfloat16
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.randint(0, 200, (4, 16)).cuda()
    model(input_ids=ids, labels=torch.randint(0, 7, (4,)).cuda()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    (tmp_path / "words.py").write_text("from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained('some/words')\n")
    trace, notes = followed(["python", "train.py"], tmp_path, monkeypatch)
    assert trace.meta["recipe"]["precision"] == "bf16" and any("weights of small are not read" in note for note in notes)  # type: ignore[index]
    assert not any("dropout" in op.name for op in trace.ops()) and any("softmax" in op.name for op in trace.ops())
    with pytest.raises(ModelError, match=r"words.py:2: the tokenizer of some/words is not on this machine"):
        followed(["python", "words.py"], tmp_path, monkeypatch)


ASTRAY = {
    "gradients asked for": "given = torch.autograd.grad(model(x).sum(), list(model.parameters()))\n"
    "    for p, g in zip(model.parameters(), given): p.grad = g\n    optimizer.step()",
    "numpy": "import numpy\n    model(torch.as_tensor(numpy.ones((4, 8), dtype='float32'), device='cuda')).sum().backward()\n    optimizer.step()",
    "by name": "loss = model(x).sum(); loss.backward()\n    nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=0.5); optimizer.step()",
    "curvature": "optimizer = torch.optim.LBFGS(model.parameters(), history_size=7)\n    def closure():\n        optimizer.zero_grad()\n"
    "        loss = model(x).square().sum(); loss.backward(); return loss\n    optimizer.step(closure)",
}


@pytest.mark.parametrize("kind", ASTRAY)
def test_steps_are_found_however_they_are_written(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"for _ in range(4):\n    x = torch.randn(4, 8).cuda()\n    {ASTRAY[kind]}\n    optimizer.zero_grad()\n"
    (tmp_path / "train.py").write_text(HEAD + body)
    trace, notes = followed(["python", "train.py"], tmp_path, monkeypatch)
    assert sum(op.phase == "backward" for op in trace.programs["micro_first"].ops) > 3 and "update" in trace.programs
    if kind == "by name":
        assert trace.meta["recipe"]["clip"] == 0.5  # type: ignore[index]
    if kind == "curvature":
        held = sum(one.nbytes for one in trace.storages.values() if one.role == "optimizer" and not one.host)
        assert held >= 2 * 7 * 72 * 4 and any("all 7 pairs" in note for note in notes)


def test_whoever_asks_for_the_accelerator_gets_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "for _ in range(3):\n    model(torch.randn(4, 8).to(device)).sum().backward()\n    optimizer.step(); optimizer.zero_grad()\n"
    asks = "device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else 'cpu'\nmodel.to(device)\n"
    talks = "    torch.accelerator.synchronize(); assert torch.accelerator.device_count() == 1 and torch.accelerator.memory_allocated() == 0\n"
    (tmp_path / "named.py").write_text(f"{HEAD}device = 'cuda'\n{body}")
    (tmp_path / "asked.py").write_text(HEAD + asks + body + talks)
    named, asked = (followed(["python", f"{name}.py"], tmp_path, monkeypatch)[0] for name in ("named", "asked"))
    assert named.programs == asked.programs and named.storages == asked.storages
