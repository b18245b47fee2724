"""Names of a plan that would like to be code: refused where a plan is read, and harmless wherever one is written."""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import common, main
from foretell.errors import FileFormatError, UserError
from foretell.export import export
from foretell.export.text import toml as toml_text
from foretell.export.text import yaml as yaml_text
from foretell.plan import file as plans
from foretell.plan import text
from foretell.plan.types import Adapters, Mesh, Pipeline, Plan, Residency, Sync

yaml = pytest.importorskip("yaml")

CANARY = "canary"
SPOKEN = [
    f"$(touch {CANARY})", f"`touch {CANARY}`", f"'; touch {CANARY} #", f'"; touch {CANARY} #', f"; touch {CANARY}", f"| touch {CANARY}",
    f"&& touch {CANARY}", f"${{IFS}}$(touch {CANARY})",
    "a: b", "- a", "{{ a }}", "{a: b}", "[a]", "&anchor a", "*alias", "!!python/object:os.system a",
    "%YAML 1.2", "--- a", "| a", "> a", "? a", "@a", "# a", "a #b", "~", "null", "yes", "1e3", "0x10", "'", '"', '"""', "'''", "\\", "a\\",
    "\\N{BULLET}",
    "\\n", "\\x0a", "\\u000a", "#SBATCH --wrap=touch", "--help", "-rf", "~root", "*", "a b", " a", "a ", "ε × 模型 🙂", "a\u00a0b",
    f"coding=utf-7 +AAo-import os+ADs-os.system('touch {CANARY}')+AAo-", "{0}", "%(a)s", "${a}", "</script><script>", "a]]>", "..", "../../a",
    "a  # if: [][0] #", ", OPTIONS=True", "__import__('os')", "\u200d",
]  # fmt: skip
"""Every character of these prints: such names may be in a plan."""
STRANGE = [
    f"a\ntouch {CANARY}", f"a\n#SBATCH --wrap='touch {CANARY}'\ntouch {CANARY}\n", f"a\rtouch {CANARY}\r", f"a\r\ntouch {CANARY}",
    f"a\vtouch {CANARY}",
    f"a\ftouch {CANARY}", "a\0b", "a\x1b[2Jb", "a\x07", "a\x08", "a\x7f", f"a\x85touch {CANARY}",
    "a\x85evil: true", "a\u2028evil: true", "a\u2029evil: true",
    'a"""\nimport os\n"""', "a\u202eb", "a\u2066b", "a\u200eb", "a\ufeffb", "a\ud800b", "a\udc80b",
    "a\U000e0041b", "a\nevil: true\n- b", "\n", "\t", "a\x1cb",
    "a\n---\nkind: Pod", f"a\n'''\n{CANARY}", "a\u200bb", "x" * 5000,
]  # fmt: skip
"""These are refused when a plan is read; what is exported must not rest on that."""
CORPUS = SPOKEN + STRANGE
NAMED = [f"{number}-{re.sub(r'[^ -~]|[^A-Za-z0-9]+', '_', one)[:24]}" for number, one in enumerate(CORPUS)]


def plan_of(name: str = "some-model", on: str = "2x8xH100", **changes: Any) -> Plan:
    return Plan(model={"model": name}, hardware=on, **{"mesh": Mesh(dp_shard=16), **changes})


def with_text(evil: str, plain: str = "a") -> Plan:
    """The same text wherever a plan may have one of its own; `plain` keeps the places apart that a mapping needs."""
    model = {"model": evil, "overrides": {evil: evil, "b": [evil, {evil: 1}]}, "loss": evil, "digest": evil, "blocks": [f"{plain}.0-1"]}
    return Plan(
        model=model, hardware="2x8xH100", mesh=Mesh(dp_shard=16), blocks={f"{plain}.0": Residency(mode="recompute")},
        kernels={evil: evil}, predicted={"verdict": evil, evil: evil}, notes=(evil,),
    )  # fmt: skip


def exportable(evil: str) -> Plan:
    """Without the one text that plans may not have: kernels of other names are refused."""
    with pytest.raises(UserError, match=r"is not known|no such kernel"):
        export(with_text(evil), "slurm")
    return with_text(evil).with_(kernels={})


# ---------------------------------------------------------------- reading


def spots(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a plan's JSON has a string, or a name of somebody's own."""
    found = [here] if isinstance(value, str) else []
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += spots(item, (*here, name))
    return found


def whole() -> dict[str, Any]:
    """A plan with every kind of string."""
    return {
        "$schema": "s", "version": 1, "model": {"model": "m", "overrides": {"k": "v", "l": [["w"]]}, "loss": "l.py:f", "digest": "d",
        "shapes": {"p.weight": "3x4"}, "blocks": ["blocks.0-3"]}, "hardware": "H100", "precision": "fp32", "optimizer": "adamw",
        "compile": "none", "state_format": "fp32", "pipeline": {"schedule": "1f1b", "cuts": ["blocks.2"]}, "split": {"rules": {"a": "row"}},
        "blocks": {"blocks.0": "keep"}, "states": {"rest": "host"}, "weights": {"blocks.1": "host"}, "kernels": {"loss": "compiled"},
        "predicted": {"verdict": "fits", "binds": "host", "more": [{"n": "m"}], "provenance": {"time": "counted"}}, "notes": ["n"],
    }  # fmt: skip


@pytest.mark.parametrize("evil", STRANGE, ids=NAMED[len(SPOKEN) :])
def test_what_does_not_print_is_in_no_plan(evil: str) -> None:
    """Neither as a value nor as a name, wherever it stands: one line, which itself prints."""
    assert plans.from_json(whole()).model["model"] == "m"
    for *above, last in spots(whole()):
        for as_name in (False, True):
            data = whole()
            parent: Any = data
            for step in above:
                parent = parent[step]
            if as_name and not isinstance(parent, dict):
                continue
            parent.update({evil: parent.pop(last)}) if as_name else parent.__setitem__(last, evil)
            with pytest.raises(FileFormatError) as error:
                plans.from_json(data, "p.json")
            assert str(error.value).isprintable() and len(str(error.value)) < 300


def test_such_a_file_is_exit_2_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, evil in enumerate((f"a\ntouch {CANARY}", "a\u2028b", "a\x1b[2Jb", "x" * 5000)):
        path = tmp_path / f"{place}.json"
        path.write_text(json.dumps({**whole(), "model": {"model": evil}}))
        for words in (["export", path, "--to", "slurm"], ["export", path, "--to", "k8s"], ["eject", path], ["show", path], ["run", path]):
            assert main([*map(str, words)]) == 2
            told = capsys.readouterr().err
            assert "model.model has" in told and len(told.splitlines()) == 1 and told.strip().isprintable()
    assert not (tmp_path / CANARY).exists()


@pytest.mark.parametrize("evil", SPOKEN, ids=NAMED[: len(SPOKEN)])
def test_what_prints_is_read_and_written_as_it_is(evil: str, tmp_path: Path) -> None:
    plan = with_text(evil)
    plans.write(plan, tmp_path / "p.json")
    assert plans.read(tmp_path / "p.json") == plan


def test_a_plan_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written: model.model has U\+000A"):
        plans.write(plan_of("a\nb"), tmp_path / "p.json")
    assert not list(tmp_path.iterdir())
    plans.write(plan_of("a", notes=("two\nlines",)), tmp_path / "p.json")
    assert plans.read(tmp_path / "p.json").notes == ("two\\u000alines",)


@pytest.mark.parametrize(
    "number", ["1e999", "-1e999", "1" * 400, "9" * 5000, "-" + "9" * 5000, "1" + "0" * 31], ids=lambda number: f"{len(number)}-{number[:5]}"
)
def test_numbers_that_no_plan_needs_are_refused(number: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"version": 1, "model": {"model": "m", "overrides": {"a": ' + number + '}}, "hardware": "H100"}')
    with pytest.raises(FileFormatError, match="is too large a number"):
        plans.read(path)


def test_what_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for depth in (40, 500, 100_000):
        path.write_text('{"version": 1, "model": {"model": "m", "overrides": {"a": ' + "[" * depth + "]" * depth + '}}, "hardware": "H100"}')
        with pytest.raises(FileFormatError, match="nested"):
            plans.read(path)


# ---------------------------------------------------------------- shell


STUB = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" >> calls\n'
STUB += '[ "$(basename "$0")" = scontrol ] && echo node-0\n[ "$1" = torchrun ] && "$@"\nexit 0\n'


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    for name in ("srun", "torchrun", "scontrol", "foretell", "sbatch"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    return folder


STARTED = b"torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-0:29500 -m foretell run plan.json --out run"
STARTED = STARTED.replace(b" ", b"\0")
"""Once as what srun is given, once as what it starts."""


def ran(script: str, folder: Path, stubs: Path) -> None:
    """Run a script; what it called and what it made is in the folder afterwards."""
    folder.mkdir()
    (folder / "script").write_text(script, encoding="utf-8")
    env = {"PATH": f"{stubs}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "n", "HOME": str(folder)}
    done = subprocess.run(["bash", "script"], cwd=folder, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


def everywhere(evil: str) -> dict[str, Plan]:
    """A text as the model's name, within a path, as hardware that is elsewhere, and wherever else."""
    return {
        "model": plan_of(evil), "file": plan_of(f"{evil}.py:{evil}"), "all": exportable(evil),
        "hardware": plan_of(on=f"{evil}.json"), "auto": plan_of(on=f"auto{evil}"), "hf": plan_of(f"hf:{evil}"),
        "adapted": plan_of(adapters=Adapters(rank=4, alpha=8.0, targets=(evil,), train=(evil,)), base={"": "nf4", evil: "bf16"}),
        "joined": plan_of(evil, mesh=Mesh(dp_replicate=16), sync=Sync(every=20)),
    }  # fmt: skip


USUAL = everywhere("some-model")


@functools.cache
def usual(place: str, tool: str, name: str) -> str:
    return export(USUAL[place], tool).files[name]


def test_the_stubs_would_see_it(tmp_path: Path, stubs: Path) -> None:
    """That the check can fail: what stood in the script before is run by bash."""
    ran(f"# for a\ntouch {CANARY}\nsrun torchrun x", tmp_path / "a", stubs)
    assert (tmp_path / "a" / CANARY).exists()


@pytest.mark.parametrize("evil", CORPUS, ids=NAMED)
def test_slurm_runs_what_it_should_and_nothing_else(evil: str, tmp_path: Path, stubs: Path) -> None:
    for place, plan in everywhere(evil).items():
        script, known = export(plan, "slurm").files["train.sbatch"], usual(place, "slurm", "train.sbatch")
        assert all(line.isprintable() for line in script.split("\n"))
        settings, others = ([line for line in one.split("\n") if line.startswith("#SBATCH")] for one in (script, known))
        first, second = ([re.sub("job-name=[a-z][a-z0-9-]*$", "", line) for line in one] for one in (settings, others))
        assert first == second
        assert [line for line in script.split("\n") if not line.startswith("#")] == [line for line in known.split("\n") if not line.startswith("#")]
    ran(export(exportable(evil), "slurm").files["train.sbatch"], tmp_path / "evil", stubs)
    there = {path.name: path.read_bytes() for path in (tmp_path / "evil").iterdir() if path.name != "script"}
    assert there == {"calls": b"scontrol\0show\0hostnames\0n\0srun\0" + STARTED + b"\0" + STARTED + b"\0"}


@pytest.mark.parametrize("evil", [one for one in CORPUS if "\0" not in one and "\ud800" not in one and len(one) < 300])
def test_a_word_of_a_command_is_one_word(evil: str) -> None:
    made = text.shell_word(evil)
    assert made.isprintable()
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {made}"], capture_output=True, check=True)
    assert done.stdout == os.fsencode(f"./{evil}" if evil.startswith("-") else evil) + b"\0"


def test_what_is_suggested_can_be_pasted() -> None:
    from foretell.plan.facts import Facts
    from foretell.report.terminal.plan import render

    shown = render(plan_of("m"), (), Facts(), 200, path="my plans/a;b $(c).json").plain
    assert "-m foretell run 'my plans/a;b $(c).json'" in shown


# ---------------------------------------------------------------- yaml, toml, json


def shape(value: Any) -> Any:
    """Keys and types without texts."""
    if isinstance(value, Mapping):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return str if isinstance(value, str) else value


@pytest.mark.parametrize("evil", CORPUS, ids=NAMED)
def test_yaml_and_toml_keep_their_shape_and_the_text(evil: str) -> None:
    kept = re.sub("[\ud800-\udfff]", "\ufffd", evil)
    value = {"a": evil, "b": [evil, {"c": evil, "d": 1}], "e": f"one\n{evil}\n", "f": f"{evil}\n", "g": f" {evil}\n\n"}
    back = {"a": kept, "b": [kept, {"c": kept, "d": 1}], "e": f"one\n{kept}\n", "f": f"{kept}\n", "g": f" {kept}\n\n"}
    assert yaml.safe_load(yaml_text(value)) == back
    assert len(evil) > 1000 or yaml.safe_load(yaml_text({evil: 1, "a": 2})) == {kept: 1, "a": 2}
    assert tomllib.loads(toml_text({"t": {"a": evil, "b": [evil, [evil]], "c": 1}})) == {"t": {"a": kept, "b": [kept, [kept]], "c": 1}}


QUICK = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1035, which is the narrower one."""


@pytest.mark.parametrize("evil", CORPUS, ids=NAMED)
def test_yaml_and_json_of_every_tool_are_those_of_a_plain_plan(evil: str) -> None:
    for place, plan in everywhere(evil).items():
        config, service, job = yaml.load_all(export(plan, "k8s").files["job.yaml"], QUICK)
        known = list(yaml.load_all(usual(place, "k8s", "job.yaml"), QUICK))
        assert shape([config, service, job]) == shape(known)
        assert json.loads(config["data"]["plan.json"])["model"]["model"] == plan.model["model"]
        assert all(LABEL.fullmatch(one["metadata"]["name"]) for one in (config, service, job))
        commands = [one["spec"]["template"]["spec"]["containers"][0]["command"][2] for one in (job, known[2])]
        first, second = (re.sub(" [a-z0-9.-]+:29500 ", " ", command) for command in commands)
        assert first == second
        made = yaml.load(export(plan, "accelerate").files["accelerate.yaml"], QUICK)
        assert made == yaml.load(usual(place, "accelerate", "accelerate.yaml"), QUICK)
        if plan.hardware == "2x8xH100":
            made = yaml.load(export(plan, "skypilot").files["task.yaml"], QUICK)
            assert LABEL.fullmatch(made.pop("name"))
            assert {"name": "some-model", **made} == {**yaml.load(usual(place, "skypilot", "task.yaml"), QUICK), "name": "some-model"}
        texts = (export(plan, "deepspeed").files["ds_config.json"], usual(place, "deepspeed", "ds_config.json"))
        made, other = ({key: shape(value) if key[0] == "_" else value for key, value in json.loads(one).items()} for one in texts)
        assert made == other
        assert all(line.isprintable() for line in plans.text_of(plan).split("\n"))


def titan(evil: str) -> Plan:
    """torchtitan has models of its own; of a plan's texts it gets hardware and blocks; kernels of other names are refused."""
    evil = evil.replace(".", "_")  # a dot, a dash between numbers and * have a meaning in paths
    blocks = [f"{evil}.{number}" for number in range(4)]
    return Plan(
        model={"model": "llama3-8b", "blocks": blocks, "seq": 8192}, hardware=f"{evil}.json", mesh=Mesh(pp=2, dp_shard=8),
        accumulate=4, pipeline=Pipeline(schedule="1f1b", cuts=(blocks[2],)), kernels={"loss": "compiled"},
    )  # fmt: skip


@pytest.mark.parametrize("evil", [one for one in CORPUS if not one.startswith(("*", "\\"))])
def test_torchtitan_gets_toml_and_python_of_the_same_shape(evil: str) -> None:
    made, usual = export(titan(evil), "torchtitan").files, export(titan("layers"), "torchtitan").files
    found = tomllib.loads(made["train.toml"])
    assert shape(found) == shape(tomllib.loads(usual["train.toml"]))
    kept = re.sub("[\ud800-\udfff]", "\ufffd", evil.replace(".", "_"))
    assert found["parallelism"]["module_fqns_per_model_part"][1][0] == f"{kept}.2"
    same_code(made["foretell_plan.py"], usual["foretell_plan.py"])


# ---------------------------------------------------------------- python


def skeleton(source: str) -> str:
    """Code without the texts in it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def same_code(made: str, usual: str) -> None:
    """The same code but for its texts, however Python reads the file."""
    assert skeleton(made) == skeleton(usual)
    assert all(line.isprintable() for line in made.split("\n"))
    assert tokenize.detect_encoding(io.BytesIO(made.encode()).readline)[0] == "utf-8"
    assert made.encode().decode() == made


MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x)

class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.stack = name
        self.add_module(name, nn.ModuleList([Block() for _ in range(4)]))

    def forward(self, **rows):
        (x,) = rows.values()
        for block in getattr(self, self.stack):
            x = block(x)
        return x.sum()

def net(name="blocks", **more):
    return Net(name)

def batch(micro_batch):
    return {BATCH: torch.randn(micro_batch, 8)}
"""
ESCAPE = f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'BuiltinImporter'][0].load_module('os').system('touch {CANARY}')"
"""Code that runs a command though it has no builtins."""
CONDITIONS = [f"a  # if: {ESCAPE} #", f"a\n    x = 1  # if: {ESCAPE} #", "a\nb  # if: 1 / 0 #", f'a"  # if: {ESCAPE} #']
"""What the script's own pieces have: looked for in them alone."""
AS_MODULE = ["a'b", '" for n in []] + [f"', "{n}{1/0}", 'a"""\nimport os\n"""', "a\\", "\u2028\x85\r\n", "a  # if: 1 / 0 #", "__import__('os')"]
AS_FILE = [f'a"; import os; os system("touch {CANARY}") #', f"a\nimport os\ntouch {CANARY}", "a\\", "\u2028", '"""', "a' + 'b"]


def scripted(folder: Path, evil: str, stem: str = "own") -> Any:
    """The script of a model whose modules, settings, batch and out path have this name; all of the corpus is in its settings."""
    from foretell.eject.script import eject
    from foretell.runtime.train.folder import RunSettings

    folder.mkdir(parents=True)
    path = folder / f"{stem}.py"
    path.write_text(f"BATCH = {evil!a}\n{MODEL}", encoding="utf-8")
    settings = {"name": evil, evil: [evil, {evil: 1.5}], "class": None, **{one: one for one in CORPUS if one not in AS_MODULE}}
    plan = Plan(
        model={"model": f"{path}:net", "overrides": {**settings, "more": CONDITIONS}}, hardware=f"auto {evil}",
        precision="fp32", notes=(evil,), predicted={evil: evil}, compile="blocks",
    )  # fmt: skip
    return eject(plan, folder / f"train{evil.replace('/', '_')}.py", RunSettings(schedule="constant"))


@pytest.fixture(scope="module")
def plain_script(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(scripted(tmp_path_factory.mktemp("plain") / "a", "a-b").text)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("evil", AS_MODULE)
def test_an_ejected_script_is_the_same_code(evil: str, plain_script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = scripted(tmp_path / "files", evil)
    same_code(made.text, plain_script)
    texts = {node.value for node in ast.walk(ast.parse(made.text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert {evil, f"{evil}.0", *CORPUS, *CONDITIONS} - set(AS_MODULE) <= texts and {evil, f"{evil}.0"} <= texts
    assert made.command.isprintable()
    assert not list((tmp_path / "here").iterdir()), "something was run"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("evil", AS_FILE)
def test_a_model_file_of_any_name_is_imported_by_that_name(evil: str, plain_script: str, tmp_path: Path) -> None:
    made = scripted(tmp_path / evil, "a-b", evil)
    same_code(made.text, plain_script)
    calls = [node for node in ast.walk(ast.parse(made.text)) if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module"]
    assert [ast.literal_eval(call.args[0]) for call in calls] == [evil]


@pytest.mark.parametrize("evil", [*(one for one in CORPUS if not one.isidentifier()), *AS_MODULE, *CONDITIONS, "class", "None", "ñ", "1"])
def test_names_in_code_are_words_or_texts(evil: str) -> None:
    from foretell.eject.compose import dotted, literal
    from foretell.eject.model import _keywords
    from foretell.eject.script import _paths_text
    from foretell.eject.tensor import _tied

    assert ast.literal_eval(literal({evil: [evil, (evil,), 1.5, None, True]})) == {evil: [evil, (evil,), 1.5, None, True]}
    assert eval(literal([float("inf"), float("-inf")])) == [float("inf"), float("-inf")]
    assert "\n" not in literal(evil)
    node = ast.parse(dotted("own", evil), mode="eval").body
    assert isinstance(node, ast.Call) and ast.literal_eval(node.args[1]) == evil
    call = ast.parse(f"f({_keywords({evil: 1})})", mode="eval").body
    assert isinstance(call, ast.Call) and ast.literal_eval(call.keywords[0].value) == {evil: 1}
    names = [f"{evil}.{number}" for number in range(4)]
    assert eval(_paths_text(names), {"range": range}) == names
    (tie,) = ast.parse(_tied(f"a.{evil}.weight", f"{evil}.weight")).body
    assert isinstance(tie, ast.Expr) and ast.unparse(tie).startswith("setattr(model.get_submodule(")


# ---------------------------------------------------------------- screens


@pytest.mark.parametrize("evil", CORPUS, ids=NAMED)
def test_a_screen_gets_no_controls(evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    common.emit(f"a {evil} b")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", capsys.readouterr().out.replace("\t", ""))


CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("evil", CORPUS, ids=NAMED)
def test_a_table_of_faults_has_a_line_for_each_thing_it_says(evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Trials come from a file: names and problems in it are whatever somebody wrote there."""
    from foretell.runtime.chaos.campaign import ChaosTrial
    from foretell.runtime.chaos.table import render, rows_by_fault

    lost = ChaosTrial(fault=evil, ranks=2, seed=0, step=9, good=False, problem=f"a {evil} b")
    text = render([lost, ChaosTrial(fault="kill", ranks=2, seed=0, step=9, good=False, not_tried=f"a {evil} b")])
    common.emit(text)
    said = capsys.readouterr().out
    assert len(said.rstrip("\n").split("\n")) == 5 and not CONTROLS.search(said)
    assert json.loads(json.dumps(rows_by_fault([lost])))[0]["fault"] == evil


@pytest.mark.parametrize("evil", CORPUS, ids=NAMED)
def test_a_fault_is_one_row_and_its_line_has_no_controls(evil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ranks say they died of is the user's own text."""
    from foretell.report.goodput import told_of
    from foretell.runtime.train.folder import FAULTS, note_fault

    note_fault(tmp_path, "fault", kind="crashed", words=evil)
    note_fault(tmp_path, "restarted", seconds=evil)
    rows = (tmp_path / FAULTS).read_text().split("\n")
    assert len(rows) == 3 and json.loads(rows[0])["words"] == evil and json.loads(rows[1])["seconds"] == evil
    assert told_of(tmp_path) == ""
    common.emit(f"a {evil} b")
    assert not CONTROLS.search(capsys.readouterr().out.replace("\t", ""))


@pytest.mark.parametrize("evil", [one for one in CORPUS if "\ud800" not in one and "\udc80" not in one])
def test_adapters_for_peft_are_json_of_the_same_shape(evil: str) -> None:
    from foretell.checkpoint.peft_files import _config

    def config(name: str) -> Any:
        return json.loads(json.dumps(_config(Adapters(rank=4, alpha=8.0, targets=(name,), train=(name,)), [f"layers.0.{name}.lora_A"], name)))

    made, usual = config(evil), config("layers")
    assert isinstance(made.pop("base_model_name_or_path"), str | None) and usual.pop("base_model_name_or_path") is None
    assert shape(made) == shape(usual)
