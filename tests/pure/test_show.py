"""`foretell plan show`: what it draws and says, at every width, and how it fails."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.hardware import parse
from foretell.plan import file, legal, schema
from foretell.plan.facts import facts_of
from foretell.plan.types import Mesh, Pipeline, Plan, Residency, Split
from foretell.report.terminal import plan as page
from tests.pure import warm

ROOT = Path(__file__).resolve().parents[2]
GPT = {"model": "gpt2", "seq": 1024, "parameters": 124439808, "blocks": ["blocks.0-11"]}
RECOMPUTE, SELECTIVE = Residency(mode="recompute"), Residency(mode="selective")

ONE = Plan(
    model=GPT, hardware="H100", micro_batch=8, blocks={"blocks.*": SELECTIVE, "blocks.0-1": Residency()},
    predicted={
        "verdict": "fits", "step_seconds": 0.142, "low_seconds": 0.131, "high_seconds": 0.155, "tokens_per_second": 57700.0,
        "memory_bytes": 61 * 2**30, "capacity_bytes": 79 * 2**30, "provenance": {"time": "measured", "memory": "counted"},
    },
)  # fmt: skip
THREE = Plan(
    model=GPT, hardware="8xH100", mesh=Mesh(pp=2, dp_shard=2, tp=2), pipeline=Pipeline(cuts=("blocks.6",)), accumulate=8,
    micro_batch=4, blocks={"blocks.0-3": RECOMPUTE}, notes=("chosen of 12 plans",),
    predicted={"collectives": [{"name": "send", "axis": "pp", "ranks": 2, "nbytes": 2**20, "times": 16}]},
)  # fmt: skip
BACK = Plan(
    model=GPT, hardware="4xH100", mesh=Mesh(pp=2, dp_replicate=2), accumulate=8, reshard=False, clip=None,
    pipeline=Pipeline(schedule="zero-bubble-v", cuts=("blocks.1", "blocks.6", "blocks.9")),
)  # fmt: skip
DEEP = [f"layers.{number}" for number in range(126)]
LARGE = Plan(
    model={"model": "llama3-405b", "seq": 8192, "blocks": ["layers.0-125"]}, hardware="64x8xH100@IB400",
    mesh=Mesh(pp=16, dp_replicate=2, dp_shard=2, tp=8), accumulate=32, compile="blocks",
    pipeline=Pipeline(schedule="interleaved-1f1b", cuts=tuple(DEEP[4::4])), blocks={"layers.0-60": RECOMPUTE},
)  # fmt: skip
FLAT = Plan(
    model={"model": "m.py:build", "image": 224, "blocks": []}, hardware="auto", mesh=Mesh(dp_replicate=64), kernels={"norm": "fast"},
)  # fmt: skip
UNKNOWN = Plan(
    model={"model": "m.py:build"}, hardware="cluster.toml", mesh=Mesh(dp_shard=16, tp=2), split=Split(loss=False), reshard=4,
    blocks={"blocks.*": RECOMPUTE},
)  # fmt: skip
PLANS = {"one": ONE, "three": THREE, "back": BACK, "large": LARGE, "flat": FLAT, "unknown": UNKNOWN}


def drawn(plan: Plan, width: int = 80, **options: Any) -> str:
    cluster = None if plan.hardware in ("auto", "cluster.toml") else parse(plan.hardware)
    return page.render(plan, (), facts_of(plan, cluster), width, path="plan.json", **options).plain


# ---------------------------------------------------------------- drawings


def test_one_rank_is_drawn() -> None:
    assert drawn(ONE) == (
        "gpt2 on H100: one rank\n"
        "  124M parameters; micro-batch 8 × 1,024 tokens: 8 samples or 8,192 tokens a\n"
        "  step\n"
        "  bf16-mixed, adamw-fused, gradients clipped at norm 1, not compiled\n"
        "\n"
        "blocks     ██▓▓▓▓▓▓▓▓▓▓  blocks.0-11\n"
        "           █ kept until backward; ▓ products and attention kept, the rest\n"
        "           computed again\n"
        "\n"
        "predicted  142 ms (131–155) a step, 57,700 tokens a second; measured\n"
        "           fits: 61.0 GiB of 79.0 GiB on the device; counted\n"
        "\n"
        "next       foretell run plan.json"
    )


def test_three_axes_are_drawn() -> None:
    assert drawn(THREE) == (
        "gpt2 on 8xH100: 8 ranks = pp 2 × dp_shard 2 × tp 2\n"
        "  124M parameters; micro-batch 4 × 1,024 tokens, 8 accumulated, 2 data ranks: 64\n"
        "  samples or 65,536 tokens a step\n"
        "  bf16-mixed, adamw-fused, gradients clipped at norm 1, not compiled\n"
        "\n"
        "mesh       ranks share in ( ) parameters and states (dp_shard), in [ ] every\n"
        "           product (tp)\n"
        "  pp 0     ([0 1] [2 3])\n"
        "  pp 1     ([4 5] [6 7])\n"
        "\n"
        "talk       tp 0 1 and 3 more        activations, in every block, forward and\n"
        "                                    backward\n"
        "           dp_shard 0 2 and 3 more  parameters of a block before it runs, its\n"
        "                                    gradients in backward\n"
        "           pp 0 4 and 3 more        activations of every micro-batch to the next\n"
        "                                    stage, gradients back; 16.0 MiB of messages\n"
        "                                    a step\n"
        "\n"
        "stages     1f1b: one forward, one backward in turn; 8 micro-batches\n"
        "           a rank waits 11 % of the step for other stages, if all take equally\n"
        "           long\n"
        "           pp 0 holds up to 2 micro-batches at a time, the last stage 1\n"
        "  pp 0 stage 0  ▒▒▒▒██  start, blocks.0-5\n"
        "  pp 1 stage 1  ██████  blocks.6-11, end\n"
        "           █ kept until backward; ▒ computed again in backward; start and end:\n"
        "           what runs before and after the blocks\n"
        "\n"
        "predicted  nothing: this plan was not costed\n"
        "\n"
        "notes      - chosen of 12 plans\n"
        "\n"
        "next       torchrun --nproc-per-node 8 -m foretell run plan.json"
    )


def test_stages_that_go_down_and_back_up_are_drawn() -> None:
    text = drawn(BACK)
    rows = (
        "  pp 0 stage 0  █      start, blocks.0\n"
        "  pp 1 stage 1  █████  blocks.1-5\n"
        "  pp 1 stage 2  ███    blocks.6-8\n"
        "  pp 0 stage 3  ███    blocks.9-11, end\n"
    )
    assert rows in text
    assert "  pp 0     0 1\n  pp 1     2 3\n" in text and "gradients not clipped" in text
    assert "dp_replicate 0 1 and 1 more  gradients, once a step" in text


def test_a_large_mesh_is_cut_in_the_middle() -> None:
    text = drawn(LARGE)
    assert "  pp 0     ([0-7] [8-15])  ([16-23] [24-31])\n" in text
    assert "  … 9 more\n  pp 15    ([480-487] [488-495])  ([496-503] [504-511])\n" in text
    assert "a rank waits 19 % of the step" in text, "15 of 2 × 32 + 15"
    flat = " ".join(text.split())
    assert "tp 0-7 and 63 more activations, in every block, forward and backward; inside a node" in flat
    assert "dp_replicate 0 16 and 255 more gradients, once a step; between nodes" in flat
    assert flat.count("inside a node") == 1 and flat.count("between nodes") == 3
    assert text.endswith("torchrun --nnodes 64 --nproc-per-node 8 -m foretell run plan.json")
    assert "  pp 15 stage 15  ▒███  layers.60-63\n" in text and "  pp 0  stage 16  ████  layers.64-67\n" in text


def test_many_blocks_are_counted_instead_of_drawn() -> None:
    whole = LARGE.with_(mesh=Mesh(), pipeline=None, hardware="H100")
    assert "blocks     61▒ 65█  layers.0-125\n" in drawn(whole)
    assert "blocks     " + "▒" * 61 + "█" * 65 + "  layers.0-125\n" in drawn(whole, 300)


def test_what_is_not_known_is_said_to_be() -> None:
    text = drawn(UNKNOWN)
    assert "blocks.*: computed again in backward" in text
    assert "which blocks the model has, the plan does not say" in text
    assert (
        "gathered parameters shared by 4 ranks until backward, split as the dataflow says, loss not split"
        in " ".join(text.split())
    )
    assert "([0 1] [2 3] [4 5] [6 7] [8 9] [10 11] [12 13] [14 15] [16 17] …" in text
    assert "16 samples or 4,096 tokens a step" in drawn(UNKNOWN.with_(predicted={"tokens_per_step": 4096}))
    assert "the model has no repeated blocks" in drawn(FLAT) and "224×224 pixels" in drawn(FLAT)
    assert "each rank has a copy of the model\n           0-63" in drawn(FLAT)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("width", [40, 57, 80, 120])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    wide = [line for line in drawn(PLANS[name], width).splitlines() if len(line) > width]
    assert all("foretell run plan.json" in line for line in wide), "a command stays whole, so that it can be copied"


@pytest.mark.parametrize("name", PLANS)
def test_it_reads_in_ascii(name: str) -> None:
    text = drawn(PLANS[name], ascii_only=True)
    assert text.isascii() and ("r" * 4 + "##  start" in text) == (name == "three")


def test_a_name_with_control_characters_is_harmless() -> None:
    odd = ONE.with_(model={"model": "a\x1b[31m\nb", "blocks": ["blocks.0-1"]}, blocks={}, notes=("x\x07\ny",))
    assert "\x1b" not in drawn(odd) and "\x07" not in drawn(odd) and drawn(odd).startswith("a [31m b on H100")


def test_the_page_about_plans_shows_what_is_shown() -> None:
    told = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    example = json.loads(told.split("```json\n")[1].split("```")[0])
    plan = file.from_json(example)
    assert file.text_of(plan) == told.split("```json\n")[1].split("```")[0]
    assert "$ foretell plan show plan.json\n" in told  # what that prints is compared where all examples of the pages are
    for complaint in legal.complaints(plan, facts_of(plan, parse(plan.hardware))):
        pytest.fail(str(complaint))
    for name in schema.load()["properties"]:
        assert f"`{name}`" in told, f"docs/plan.md does not tell of {name}"


# ---------------------------------------------------------------- the command


def environment(**changes: str) -> dict[str, str]:
    dropped = ("RANK", "NO_COLOR", "COLUMNS", "FORETELL_DEBUG", "FORCE_COLOR")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "PYTHONPATH": str(ROOT), **changes}


def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return warm.run(*words, env=environment(**changes))


def written(plan: Plan, folder: Path) -> str:
    file.write(plan, folder / "plan.json")
    return str(folder / "plan.json")


def test_a_plan_that_may_be_run(tmp_path: Path) -> None:
    path = written(THREE, tmp_path)
    done = run("show", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == drawn(THREE).replace("plan.json", path) + "\n"
    narrow = run("show", path, COLUMNS="50").stdout
    assert max(map(len, narrow.splitlines()[:-1])) <= 50


def test_a_plan_that_may_not_be_run(tmp_path: Path) -> None:
    done = run("show", written(THREE.with_(hardware="4xH100", accumulate=1), tmp_path))
    assert done.returncode == 1 and done.stderr == ""
    text = " ".join(done.stdout.split())
    assert "REFUSED mesh: pp 2 × dp_shard 2 × tp 2 makes 8 ranks and there are 4 devices; try:" in text
    assert "REFUSED accumulate: 1f1b on 2 ranks wants at least 2 micro-batches and gets 1; try: accumulate 2" in text
    assert "foretell run" not in text
    unknown = run("show", written(ONE.with_(hardware="H1000"), tmp_path))
    assert unknown.returncode == 1 and "REFUSED    hardware: " in unknown.stdout


def test_for_programs(tmp_path: Path) -> None:
    done = run("show", written(BACK, tmp_path), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["runs"] is True and found["complaints"] == []
    assert {"schema_version", "versions", "assumptions"} <= set(found)
    assert file.from_json(found["plan"]) == BACK
    assert (found["world"], found["global_batch"], found["tokens_per_step"]) == (4, 16, 16384)
    assert found["groups"] == {"pp": [[0, 2], [1, 3]], "dp_replicate": [[0, 1], [2, 3]]}
    assert [(stage["rank"], len(stage["blocks"])) for stage in found["stages"]] == [(0, 1), (1, 5), (1, 3), (0, 3)]
    bad = run("show", written(BACK.with_(reshard=True), tmp_path), "--json")
    (one,) = json.loads(bad.stdout)["complaints"]
    assert bad.returncode == 1 and one["field"] == "reshard" and one["remedy"] == "reshard false"


def test_a_bad_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(
        '{"version": 1, "model": {"model": "gpt2"}, "hardware": "H100", "mesh": {"tp": "two"}}'
    )
    for path, words in (
        ("bad.json", 'mesh.tp is "two"; try: write a whole number'),
        ("none.json", "there is no plan file"),
    ):
        done = run("show", str(tmp_path / path))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("error: ") and words in done.stderr
        told = run("show", str(tmp_path / path), "--json")
        assert told.returncode == 2 and json.loads(told.stdout)["error"]["remedy"]
    assert run("show").returncode == 2


def test_the_schema_can_be_asked_for() -> None:
    done = run("show", "--schema")
    assert done.returncode == 0 and json.loads(done.stdout) == schema.load()
    jsonschema.Draft202012Validator.check_schema(json.loads(done.stdout))


def test_it_needs_no_torch(tmp_path: Path) -> None:
    path = written(THREE, tmp_path)
    check = f"import sys\nfrom foretell.cli import main\nassert main(['show', {path!r}]) == 0\nassert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", check], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("changes", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_only_where_it_is_wanted(changes: dict[str, str], coloured: bool, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "foretell", "show", written(THREE, tmp_path)]
    with subprocess.Popen(
        words, env=environment(**{"TERM": "xterm", **changes}), stdout=follower, stderr=follower, cwd=ROOT
    ) as process:
        os.close(follower)
        text = b""
        while chunk := _some(leader):
            text += chunk
        assert process.wait(60) == 0
    os.close(leader)
    assert (b"\x1b[" in text) is coloured
    assert "▒▒▒▒" in text.decode()


def _some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is gone
        return b""
