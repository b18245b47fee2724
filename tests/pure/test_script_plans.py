"""Plans for training scripts: searched, written and read back; the change to the script that they stand for applies, and gives what was predicted."""

from __future__ import annotations

import ast
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretell import api
from foretell.eject.patch import Patch, patch
from foretell.eject.places import NotFound, SourceFile
from foretell.errors import ForetellError, UserError
from foretell.hardware import parse
from foretell.plan.file import read, write
from foretell.plan.types import Mesh, Plan, Residency
from foretell.search.solve.scripted import choose_for
from foretell.search.space.constraints import SearchConstraints
from foretell.trace.load.model import Source, describe, load

SCRIPTS = Path(__file__).resolve().parents[1] / "data" / "scripts"
GPT = ["python", "gpt_scaler.py", "--batch-size", "16", "--layers", "2"]
AGAIN = Residency(mode="recompute")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the scripts, and a cache of its own, for all tests here."""
    folder = tmp_path_factory.mktemp("scripts")
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FORETELL_CACHE", str(folder / "cache"))
        patched.chdir(folder)
        yield folder


def applied(made: Patch, home: Path, name: str) -> Path:
    """A folder with the patched script, by `patch` itself."""
    folder = home / f"patched-{name}"
    folder.mkdir()
    for path in home.glob("*.py"):
        shutil.copy(path, folder)
    done = subprocess.run(["patch", "-p0"], input=made.diff, text=True, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in folder.glob("*.py"):
        compile(path.read_text(), str(path), "exec")
    return folder


def planned(words: list[str], on: str, home: Path, **wishes: object) -> Plan:
    found = choose_for(words, parse(on), on, SearchConstraints(**wishes), exact=True)  # type: ignore[arg-type]
    path = home / "plan.json"
    write(found.plan, path)
    assert read(path) == found.plan
    return read(path)


def test_the_patched_script_needs_what_its_plan_says_on_one_device(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batch, accumulation and recomputation of some blocks, by the search's own choice under a cap."""
    on = "H100,memory=1300MiB"
    plan = planned(GPT, on, home)
    assert plan.global_batch == 16 and plan.accumulate > 1 and plan.precision == "fp16-mixed" and plan.optimizer == "adamw" and plan.clip == 1.0
    made = patch(plan)
    assert not made.instructions and made.command == shlex.join(GPT)
    monkeypatch.chdir(applied(made, home, "one"))
    answer = api.fit_script(shlex.split(made.command), hardware=on)
    recipe = answer.model["recipe"]
    assert answer.model["micro_batch"] == plan.micro_batch and recipe["accumulate"] == plan.accumulate
    assert abs(answer.memory.allocated_bytes / plan.predicted["allocated_bytes"] - 1) < 0.001
    assert answer.memory.device_bytes == plan.predicted["memory_bytes"]


@pytest.mark.slow(reason="a search for ranks; that of one device is run above, and ranks of scripts in test_script_ranks.py")
def test_the_patched_script_needs_what_its_plan_says_on_two_devices(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(GPT, "H100:2", home, fixed={"dp_shard": 2})
    assert plan.mesh == Mesh(dp_shard=2) and plan.global_batch == 16
    made = patch(plan)
    assert not made.instructions and made.command.startswith("torchrun --nproc-per-node 2 gpt_scaler.py")
    monkeypatch.chdir(applied(made, home, "two"))
    answer = api.fit_script(shlex.split(made.command), hardware="H100:2")
    assert abs(answer.memory.allocated_bytes / plan.predicted["allocated_bytes"] - 1) < 0.001
    assert answer.model["recipe"]["shards"] == 2


def by_hand(name: str, on: str = "H100", **how: object) -> Plan:
    return Plan(model={"model": f"script:python {name}.py"}, hardware=on, **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def of_a_library(home: Path) -> Path:
    """A folder with a script of accelerate, patched."""
    made = patch(by_hand("accelerate_vit", micro_batch=8, accumulate=8, blocks={"blocks.0": Residency(mode="selective"), "blocks.2": AGAIN}))
    assert not made.instructions
    return applied(made, home, "library")


@pytest.mark.slow(reason="a plain script is patched and followed above; what is changed in one of a library is below")
def test_a_patched_script_of_a_library_needs_what_its_plan_says(of_a_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(of_a_library)
    answer = api.fit_script(["python", "accelerate_vit.py"], hardware="H100")
    assert answer.model["micro_batch"] == 8 and answer.model["recipe"]["accumulate"] == 8


@pytest.mark.slow(reason="scripts of three libraries; one without a library is patched and followed above")
def test_libraries_are_told_by_their_own_words(of_a_library: Path) -> None:
    changed = (of_a_library / "accelerate_vit.py").read_text()
    assert "gradient_accumulation_steps=8" in changed and "DataLoader(data, 8, shuffle=True)" in changed
    several = patch(by_hand("accelerate_vit", "H100:4", micro_batch=8, mesh=Mesh(dp_shard=4)))
    line = next(n for n, text in enumerate(Path("accelerate_vit.py").read_text().splitlines(), 1) if "Accelerator(" in text)
    told = f"accelerate_vit.py:{line}: gradient_accumulation_steps=1, fsdp_plugin"
    assert not several.diff and any(one.startswith(told) for one in several.instructions)


def test_gradients_that_would_stay_are_freed(home: Path) -> None:
    made = patch(by_hand("bert_dict", micro_batch=24))
    new = [line for line in made.diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert new == ["+            optimizer.zero_grad()"]


def test_a_script_without_a_loader_keeps_its_batches(home: Path) -> None:
    """And a model without blocks, beside its average."""
    plan = planned(["python", "conv_ema.py"], "H100", home)
    assert (plan.micro_batch, plan.accumulate, plan.precision, plan.optimizer) == (64, 1, "fp32", "momentum")
    made = patch(plan)
    assert not made.diff and not made.instructions and made.command == "python conv_ema.py"


REFUSED = {
    "take turns": (["python", "gan_turns.py"], "H100", {}, "optimizers that take turns"),
    "axis": (GPT, "H100:2", {"fixed": {"tp": 2}}, "--tp 2: ranks of a script share"),
    "precision": (GPT, "H100", {"precision": "fp32"}, "computes in fp16-mixed"),
    "no loader": (["python", "conv_ema.py"], "H100", {"micro_batch": 2}, "without a DataLoader"),
    "modules": (["python", "conv_ema.py"], "H100:2", {}, "several modules (ema, model)"),
    "several": (["torchrun", "--nproc-per-node", "2", "gpt_scaler.py"], "H100:2", {}, "one process"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_change_could_give_is_refused_in_one_line(kind: str, home: Path) -> None:
    words, on, wishes, told = REFUSED[kind]
    with pytest.raises(UserError) as caught:
        choose_for(words, parse(on), on, SearchConstraints(**wishes))  # type: ignore[arg-type]
    assert told in caught.value.problem.replace("(model, ema)", "(ema, model)") and caught.value.remedy


def test_a_script_is_not_run(home: Path) -> None:
    source = Source(model="script:python gpt_scaler.py")
    assert describe(source) == "python gpt_scaler.py, micro-batch 1"
    with pytest.raises(ForetellError) as caught:
        load(source)
    assert "eject" in caught.value.remedy  # type: ignore[attr-defined]


LOOP = """\
import torch
for epoch in range(2):
    for x in data:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step(); scheduler.step()
"""


def test_places_that_lines_do_not_tell_are_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOOP)
    file = SourceFile(str(path))
    with pytest.raises(NotFound, match="more than one statement"):
        file.statement(7)
    with pytest.raises(NotFound, match="does not call DataLoader"):
        file.call(3, "DataLoader")
    path.write_text(LOOP.replace("; scheduler.step()", "\n        scheduler.step()  # é"))
    file = SourceFile(str(path))
    node = file.statement(6)
    assert [type(one) for one in file.loops(node)] == [ast.For, ast.For]
    file.guard([file.statement(7), file.statement(8), file.statement(4)], "n % 2 == 0")
    file.insert(7, ["        n += 1"], -1)
    assert file.text().splitlines()[3:] == [
        "        if n % 2 == 0:", "            optimizer.zero_grad()", "        loss = model(x)", "        loss.backward()", "        n += 1",
        "        if n % 2 == 0:", "            optimizer.step()", "            scheduler.step()  # é",
    ]  # fmt: skip


def test_scripts_of_one_name_in_two_folders_are_two(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(["python", "conv_ema.py"], "H100", home)
    monkeypatch.chdir(tmp_path)
    Path("conv_ema.py").write_text((SCRIPTS / "conv_ema.py").read_text().replace("randn(64,", "randn(40,").replace("(64,)", "(40,)"))
    assert planned(["python", "conv_ema.py"], "H100", tmp_path).micro_batch == 40
