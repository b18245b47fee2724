"""A model that changes while it trains is noticed: planned again where that was asked for, else the run ends and says so."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.runtime.process import launch
from foretell.runtime.train.faults.growth import GrowthWatch, settings_of
from tests import forks
from tests.cpu_dist.test_supervise import rows
from tests.cpu_dist.train_cases import ROOT, losses, ten_steps
from tests.further import further

GROWS = '''
import torch
from torch import nn

class Layer(nn.Module):
    """Adds nothing at first, so that a new one changes no loss."""
    def __init__(self):
        super().__init__()
        self.inner, self.gain = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
    def forward(self, x): return x + self.gain * torch.tanh(self.inner(x))

class Net(nn.Module):
    def __init__(self, layers, frozen):
        super().__init__()
        self.layers, self.out, self.calls = nn.ModuleList([Layer() for _ in range(layers)]), nn.Linear(4, 1), 0
        if frozen: self.layers.requires_grad_(False)
    def forward(self, x):
        if self.training and torch.is_grad_enabled() and type(x) is torch.Tensor:
            self.calls += 1
            if self.calls == 8 and len(self.layers) == 1: CHANGE
        for layer in self.layers: x = layer(x)
        return self.out(x)

class Points:
    def __len__(self): return 64
    def __getitem__(self, i): return {"x": torch.full((4,), i / 64)}

def model(layers=1, frozen=False): return Net(layers, frozen)
def data(split): return Points() if split == "train" else None
def loss(output, batch): return (output - batch["x"].sum(-1, keepdim=True)).square().mean()
'''
SAYS = "\ndef grown(model): return {'layers': len(model.layers), 'frozen': not model.layers[0].gain.requires_grad}\n"
STEPS = 120
"""It is noticed within half a second of steps."""
MORE, FREEZE, THAW = "self.layers.append(Layer())", "self.layers.requires_grad_(False)", "self.layers.requires_grad_(True)"


def started(folder: Path, text: str, mesh: Mesh, *words: str, steps: int = STEPS, **overrides: Any) -> tuple[int, str, str]:
    (folder / "mine.py").write_text(text)
    model = {"model": str(folder / "mine.py"), "overrides": overrides}
    plan = Plan(model=model, hardware="CPU" if mesh.world == 1 else f"{mesh.world}x1xCPU", micro_batch=2, accumulate=2,
                precision="fp32", mesh=mesh)  # fmt: skip
    plans.write(plan, folder / "plan.json")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    course = ["--lr", "1e-2", "--schedule", "constant", "--warmup", "0", "--device", "cpu", "--no-standby", "--out", str(folder / "run")]
    run = forks.Command("run", str(folder / "plan.json"), "--steps", str(steps), *course, *words, env=env)
    told, said = run.communicate(timeout=240)
    return run.returncode or 0, told, said


@pytest.mark.parametrize("mesh", further([Mesh(), Mesh(dp_shard=2)], [Mesh(dp_shard=2)], "one process alone"))
def test_it_is_traced_and_planned_again_and_goes_on(mesh: Mesh, ranks: Any, tmp_path: Path) -> None:
    """What it has learnt stays, with the moments; the new layer is trained from then on."""
    status, told, said = started(tmp_path, GROWS.replace("CHANGE", MORE) + SAYS, mesh, "--replan")
    assert status == 0 and f"done after step {STEPS}" in told, said
    assert "the model has changed (3 new: layers.1.gain (4)" in said and "is built with layers 2, frozen False now" in said
    (row,) = [row for row in rows(tmp_path / "run") if row["event"] == "replanned"]
    kept = plans.read(tmp_path / "run" / "plan.json")
    assert kept.model["overrides"] == {"layers": 2, "frozen": False} and kept.mesh.world == mesh.world
    assert kept.model["parameters"] == 2 * 24 + 5 and 4 <= row["checkpoint"] < STEPS
    found = dict(losses(tmp_path / "run"))
    assert list(found) == list(range(1, STEPS + 1))
    (tmp_path / "still.py").write_text(GROWS.replace("CHANGE", "pass"))
    still = plans.read(tmp_path / "plan.json").with_(model={"model": str(tmp_path / "still.py")})
    course = {"steps": STEPS, "lr": 1e-2, "schedule": "constant", "warmup": 0}
    ranks(mesh.world).run(ten_steps, str(tmp_path / "twin"), still, course, False)
    twin, first = dict(losses(tmp_path / "twin")), row["checkpoint"] + 1
    assert [found[step] for step in range(1, first + 1)] == pytest.approx([twin[step] for step in range(1, first + 1)], rel=1e-6)
    assert found[STEPS] != twin[STEPS], "the new layer is trained"


def test_without_a_new_plan_the_run_ends_and_says_what_would(tmp_path: Path) -> None:
    status, _, said = started(tmp_path, GROWS.replace("CHANGE", THAW) + SAYS, Mesh(), frozen=True)
    assert status == 1 and "3 no longer frozen: layers.0.gain" in said and "--set layers=1 --set frozen=False" in said and "--replan" in said, said
    assert said.strip().count("\n") <= 3 and "Traceback" not in said


@pytest.mark.slow(reason="a run that ends so is above, and planning again is too; here both, of a model that says nothing")
def test_nothing_says_what_it_is_now(tmp_path: Path) -> None:
    status, _, said = started(tmp_path, GROWS.replace("CHANGE", MORE), Mesh(), "--replan")
    assert status == 1 and "define grown(model) in" in said and "the checkpoint of step" in said, said


class Held:
    """As much of a job as is looked at."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def named_parameters(self) -> Any:
        return self.model.named_parameters()


@pytest.mark.slow(reason="flags of one model are looked at below")
def test_a_model_that_freezes_what_was_trained_goes_on(tmp_path: Path) -> None:
    status, told, said = started(tmp_path, GROWS.replace("CHANGE", FREEZE), Mesh())
    assert status == 0 and f"done after step {STEPS}" in told, said


def test_other_models_and_values_are_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watch = GrowthWatch(Held(model))  # type: ignore[arg-type]
    nn.Linear(3, 3)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert watch.touched and not watch.changed() and not watch.touched
    model[1].weight.requires_grad_(False)
    assert not watch.changed() and not watch.changed(), "it rests"
    model[1].weight.requires_grad_(True)
    assert not watch.changed(), "and is trained again"
    monkeypatch.setenv(launch.REPLANS, "1")
    model[1].weight.requires_grad_(False)
    assert watch.changed() and watch.found is not None and watch.found.frozen == ("1.weight",)
    del watch
    other = GrowthWatch(Held(model))  # type: ignore[arg-type]
    model[0] = nn.Linear(2, 5)
    del model[1]
    assert other.changed() and other.found is not None
    assert other.found.new == {"0.weight": (5, 2), "0.bias": (5,)} and other.found.gone == ("1.weight", "1.bias")
    del other
    gc.collect()
    assert not {**hooks._global_parameter_registration_hooks, **hooks._global_module_registration_hooks}, "hooks go with who looks"


def test_the_zoo_s_model_that_grows_says_what_it_is() -> None:
    from foretell.zoo.methods import perforated

    model = perforated.build(depth1=1, depth2=1, depth3=1, depth4=1, width=4, classes=3, dendrites=1)
    perforated.grow(model)
    said = settings_of(Plan(model={"model": "perforated-tiny"}, hardware="CPU"), model)
    assert said == {"dendrites": 2, "phase": "dendrite"}
    again = perforated.build(depth1=1, depth2=1, depth3=1, depth4=1, width=4, classes=3, **said)
    assert {name: (p.shape, p.requires_grad) for name, p in again.named_parameters()} == \
        {name: (p.shape, p.requires_grad) for name, p in model.named_parameters()}  # fmt: skip
