"""Ejected scripts give the losses of `foretell run`, need nothing of foretell, and say why where there is none."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from foretell.cli import main
from foretell.eject.script import eject
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Pipeline, Plan, Residency, Split
from foretell.runtime.train import log as logs
from foretell.runtime.train.run import run

ROOT = Path(__file__).resolve().parents[2]
TEXT = Path(json.__file__).parent
GPT: dict[str, Any] = {
    "model": "gpt-tiny", "overrides": {"layers": 4, "dim": 32, "heads": 2, "context": 32, "vocab_size": 256}, "seq": 32,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model": "llama-tiny", "seq": 32,
    "overrides": {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "context": 32, "vocab_size": 256},
}  # fmt: skip
STEPS = 4
RECOMPUTED = {"blocks.*": Residency(mode="recompute")}


def plan_of(model: dict[str, Any] = GPT, **changes: Any) -> Plan:
    return Plan(model=model, hardware="CPU", **{"micro_batch": 2, "precision": "fp32", **changes})


PLANS = {
    "single": plan_of({**GPT, "overrides": {**GPT["overrides"], "dropout": 0.1}}),
    "accumulate": plan_of(accumulate=3, clip=0.5, blocks=RECOMPUTED),
    "mixed": plan_of(precision="bf16-mixed", blocks={"blocks.0-1": Residency(mode="selective")}, optimizer="adam-loop"),
    "fp16": plan_of(precision="fp16-mixed", accumulate=2, clip=0.5),
    "fp16 and fsdp": plan_of(mesh=Mesh(dp_shard=2), accumulate=2, precision="fp16-mixed", clip=None),
    "fp16 and tensor": plan_of(LLAMA, mesh=Mesh(tp=2), split=Split(sequence=False, loss=True), clip=0.5, precision="fp16-mixed"),
    "fp16 and pipeline": plan_of(
        mesh=Mesh(pp=2), accumulate=4, pipeline=Pipeline(schedule="1f1b", cuts=("blocks.2",)), clip=0.5, precision="fp16-mixed"
    ),
    "fsdp": plan_of(mesh=Mesh(dp_shard=2), accumulate=2, blocks=RECOMPUTED),
    "hsdp": plan_of(mesh=Mesh(dp_replicate=2), accumulate=2, precision="bf16-mixed"),
    "tensor": plan_of(LLAMA, mesh=Mesh(tp=2), split=Split(sequence=False, loss=True), clip=0.5),
    "fsdp and tensor": plan_of(LLAMA, mesh=Mesh(dp_shard=2, tp=2), accumulate=2, clip=0.5),
    "pipeline": plan_of(mesh=Mesh(pp=2), accumulate=4, pipeline=Pipeline(schedule="1f1b", cuts=("blocks.2",)), clip=0.5),
    "pipeline and fsdp": plan_of(
        mesh=Mesh(pp=2, dp_shard=2), accumulate=4, pipeline=Pipeline(schedule="gpipe", cuts=("blocks.2",)),
        precision="bf16-mixed", blocks=RECOMPUTED, clip=0.5,
    ),
    "looped pipeline": plan_of(
        {**LLAMA, "overrides": {**LLAMA["overrides"], "layers": 4}}, mesh=Mesh(pp=2), accumulate=4,
        pipeline=Pipeline(schedule="interleaved-1f1b", cuts=("blocks.1", "blocks.2", "blocks.3")),
    ),
}  # fmt: skip


class Silent:
    def step(self, text: str, step: int) -> None: ...

    def say(self, text: str) -> None: ...


def rows(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def script_main(path: Path) -> Callable[[list[str]], None]:
    """A script's main(), with foretell out of its reach."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[list[str]], None] = module.main
    return found


def run_plan(rank: int, world: int, plan: Plan, folder: Path, data: str | None) -> None:
    asked: dict[str, Any] = {"steps": STEPS, "data": data, "lr": 1e-2, "schedule": "wsd", "warmup": 2, "no_save": True}
    run(plan, asked, screen=Silent(), out=folder / "run", device="cpu")


def run_script(rank: int, world: int, path: Path, words: list[str]) -> None:
    script_main(path)(words)


def words_of(folder: Path, script: str, *more: str) -> list[str]:
    words = ["--steps", str(STEPS), "--lr", "1e-2", "--schedule", "wsd", "--warmup", "2", "--out", str(folder / "script"), *more]
    return [*words, "--data", str(TEXT)] if "--data" in script else words


def on_ranks(ranks: Any, plan: Plan, function: Callable[..., None], *args: Any) -> None:
    if plan.mesh.world == 1:
        function(0, 1, *args)
    else:
        ranks(plan.mesh.world).run(function, *args)


def both(ranks: Any, plan: Plan, folder: Path, *more: str) -> tuple[list[float], list[float]]:
    """Losses of `foretell run` and of the script."""
    torch.set_num_threads(1)
    path = folder / "train.py"
    path.write_text(eject(plan, path).text)
    data = str(TEXT) if "--data" in path.read_text() else None
    on_ranks(ranks, plan, run_plan, plan, folder, data)
    on_ranks(ranks, plan, run_script, path, words_of(folder, path.read_text(), *more))
    ran = [row["loss"] for row in logs.read(folder / "run" / "log.jsonl") if row["event"] == "step"]
    return ran, rows(folder / "script" / "log.jsonl")


RESUMED = ("single", "pipeline", "fp16")


@pytest.mark.slow(reason="ten kinds of script, each started as a process for every rank")
@pytest.mark.parametrize("name", PLANS)
def test_losses_are_those_of_the_run(name: str, ranks: Any, tmp_path: Path) -> None:
    plan = PLANS[name]
    ran, script = both(ranks, plan, tmp_path, *(["--save-every", "2"] if name in RESUMED else ["--no-save"]))
    assert len(ran) == len(script) == STEPS
    assert min(ran) < ran[0] - 0.1, "it learns nothing: any two scripts would agree"
    assert script == pytest.approx(ran, rel=1e-6 if plan.precision == "fp32" else 1e-4)
    if name in RESUMED:
        kept = tmp_path / "script" / "checkpoints"
        assert sorted(found.name for found in kept.iterdir()) == ["step-00000002", "step-00000004"]
        saved = FileSystemReader(kept / "step-00000004").read_metadata().state_dict_metadata
        assert ("scaler.scale" in saved and "scaler.good" in saved) == (plan.precision == "fp16-mixed")
        shutil.rmtree(kept / "step-00000004")
        text = (tmp_path / "train.py").read_text()
        on_ranks(ranks, plan, run_script, tmp_path / "train.py", words_of(tmp_path, text, "--resume", "--no-save"))
        assert rows(tmp_path / "script" / "log.jsonl")[STEPS:] == script[2:], "going on is not the same as not stopping"


def test_your_own_file_and_samples(ranks: Any, tmp_path: Path) -> None:
    plan = plan_of({"model": str(ROOT / "examples" / "train_own.py"), "overrides": {"width": 16, "depth": 2}}, accumulate=2)
    ran, script = both(ranks, plan, tmp_path, "--no-save")
    assert script == pytest.approx(ran, rel=1e-6) and len(set(script)) == STEPS


def test_the_example_batch_and_blocks_of_two_kinds(ranks: Any, tmp_path: Path) -> None:
    plan = plan_of({"model": "t5-tiny"}, optimizer="adamw", clip=None)
    ran, script = both(ranks, plan, tmp_path, "--no-save")
    assert script == pytest.approx(ran, rel=1e-6) and script[-1] < script[0]


# ---------------------------------------------------------------- the script as a text

HF: dict[str, Any] = {
    "model": "hf:llama", "seq": 32,
    "overrides": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "intermediate_size": 64, "vocab_size": 256, "max_position_embeddings": 64, "tie_word_embeddings": True},
}  # fmt: skip
MORE = {
    "hf tensor": plan_of(HF, mesh=Mesh(dp_shard=2, tp=2)),
    "compiled": plan_of(compile="blocks", mesh=Mesh(dp_shard=2), reshard=False),
    "graphs": plan_of(compile="graphs", precision="bf16", optimizer="sgd"),
    "compiled loss": plan_of(compile="model", kernels={"loss": "compiled"}, mesh=Mesh(dp_shard=2, dp_replicate=2)),
    "mixture": plan_of({"model": "mixtral-tiny"}, mesh=Mesh(dp_shard=2)),
    "pictures": plan_of({"model": "tnt-tiny"}),
}


ALIKE = pytest.mark.slow(reason="what it has is in other scripts")
LONG = ("fp16 and fsdp", "fp16 and tensor", "fp16 and pipeline", "pipeline", "hf tensor")


@pytest.mark.parametrize("name", [pytest.param(name, marks=ALIKE if name in LONG else ()) for name in [*PLANS, *MORE]])
def test_the_script_reads_well_and_needs_torch_alone(name: str, tmp_path: Path) -> None:
    plan = {**PLANS, **MORE}[name]
    path = tmp_path / "train.py"
    path.write_text(eject(plan, path).text)
    tree = ast.parse(path.read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    others = {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names)
    assert others == ({"torch", "transformers"} if "hf" in name else {"torch"})
    assert "# if:" not in path.read_text() and "foretell." not in path.read_text()
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    done = subprocess.run([ruff, "check", "--isolated", "--no-cache", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- what has no script, and why

HARDCODED = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
    def forward(self, x):
        b, t, c = x.shape
        y = self.norm(x)
        q, k, v = (layer(y).view(b, t, 4, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return x + self.out(y.reshape(b, t, -1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks: x = block(x)
        return self.head(x)

def model(): return Net()
def batch(model, micro_batch): return {"ids": torch.randint(0, 64, (micro_batch, 16)), "y": torch.randint(0, 64, (micro_batch, 16))}
def loss(output, batch): return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten())
"""
CUT = Pipeline(schedule="1f1b", cuts=("blocks.1",))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (plan_of(mesh=Mesh(tp=2)), r"blocks\.\d\.attention\.qkv is made of parts \(32\+32\+32\)"),
        (plan_of({**HF, "model": "hf:qwen3"}, mesh=Mesh(tp=2)), "q_norm is a norm within a split region"),
        (plan_of({"model": "mixtral-tiny"}, mesh=Mesh(tp=2)), "router stays whole"),
        (plan_of(LLAMA, mesh=Mesh(tp=2, pp=2), pipeline=CUT, accumulate=2), "tp with pp cannot be ejected"),
        (plan_of(mesh=Mesh(pp=2), pipeline=replace(CUT, schedule="zero-bubble"), accumulate=2), "schedule zero-bubble"),
        (plan_of({"model": "vit-tiny"}, mesh=Mesh(pp=2), pipeline=CUT, accumulate=2), "cls_token belongs to no layer"),
        (plan_of(mesh=Mesh(dp_shard=2), placement=(1, 0)), "placement cannot be ejected"),
        (plan_of(kernels={"rms_norm": "foretell"}), "the kernel for rms_norm"),
        (plan_of({"model": "hf:vit", "overrides": {"num_hidden_layers": 1}}), "more than tokens and labels: it takes pixel_values"),
        (plan_of({"model": "hf:t5", "overrides": {"num_layers": 1}}), "it is an encoder and a decoder"),
    ],
)  # fmt: skip
def test_what_needs_the_runtime_is_refused_with_the_reason(plan: Plan, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        eject(plan, tmp_path / "train.py")


def test_code_that_counts_on_whole_sizes_is_found(tmp_path: Path) -> None:
    """Cut in two, `view(b, t, 4, -1)` would go through and mix the heads."""
    (tmp_path / "net.py").write_text(HARDCODED)
    plan = plan_of({"model": str(tmp_path / "net.py")}, mesh=Mesh(tp=2))
    with pytest.raises(UserError, match=r"blocks\.0 reckons with whole sizes: view gives \(2, 16, 4, 4\) on one rank"):
        eject(plan, tmp_path / "train.py")
    (tmp_path / "net.py").write_text(HARDCODED.replace("view(b, t, 4, -1)", "view(b, t, -1, 8)"))
    assert "ColwiseParallel(input_layouts=Shard(1))" in eject(plan, tmp_path / "train.py").text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(plans.text_of(PLANS["fsdp"]))
    assert main(["eject", "plan.json"]) == 0
    assert "torchrun --nproc-per-node 2 train_gpt_tiny.py" in capsys.readouterr().out
    before = Path("train_gpt_tiny.py").read_text()
    Path("train_gpt_tiny.py").write_text("mine")
    assert main(["eject", "plan.json"]) == 2
    assert "train_gpt_tiny.py is there already; try: give --force" in capsys.readouterr().err
    assert Path("train_gpt_tiny.py").read_text() == "mine"
    assert main(["eject", "plan.json", "--force", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["eject"]["file"] == "train_gpt_tiny.py" and answer["schema_version"]
    assert Path("train_gpt_tiny.py").read_text() == before
    assert main(["eject", "plan.json", "--out", "x.txt"]) == 2
    assert main(["eject", "nowhere.json"]) == 2
