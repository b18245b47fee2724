"""`foretell zoo` and `foretell zoo query`: tags, settings, rows and scores are what sources, entries and files say."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foretell import zoo
from foretell.cli import main
from foretell.zoo import catalogue, places, rubric, tags
from foretell.zoo.catalogue import Card

ROOT = Path(__file__).resolve().parents[2]
CARDS = catalogue.cards(measured=Path("/nowhere"))
BY_MODULE = {card.module: card for card in CARDS}


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*words: str) -> Done:
    """What the command does, here: that it does without torch is a test of commands."""
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told), warnings.catch_warnings():
        status = main(list(words))
    return Done(status, out.getvalue(), told.getvalue())


def answer(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json").stdout)
    return found


def row(name: str, **more: Any) -> dict[str, Any]:
    plain = {
        "name": name, "module": zoo.get(name).module, "phase": "", "device": "Intel(R) Xeon(R) Processor", "torch": "2.11.0",
        "date": "2030-01-01", "commit": "abc", "predicted_bytes": 101, "measured_bytes": 100, "predicted_seconds": 0.011,
        "measured_seconds": 0.01, "status": "pass", "reason": "",
    }  # fmt: skip
    return {**plain, **more}


# ---------------------------------------------------------------- what is read from sources


def test_a_module_is_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {entry.module for entry in zoo.ENTRIES.values()} <= set(places.folders())
    assert all((ROOT / card.file).is_file() for card in BY_MODULE.values())
    for folder in ("graphs", "vision"):
        (tmp_path / folder).mkdir()
        for file in ("__init__.py", "net.py"):
            (tmp_path / folder / file).touch()
    monkeypatch.setattr(places, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"net.py is in graphs/ and in vision/"):
        places.folders.__wrapped__()


@pytest.mark.parametrize("module", ["gpt", "pvd", "kmax", "perforated"])
def test_settings_are_those_of_the_real_signature(module: str) -> None:
    build = importlib.import_module(places.import_path(module)).build
    real = {name: one.default for name, one in inspect.signature(build).parameters.items()}
    assert BY_MODULE[module].defaults == real


def test_imports_of_a_source_are_those_that_python_sees() -> None:
    for card in CARDS:
        real = set()
        for node in ast.walk(ast.parse(card.source)):
            if isinstance(node, ast.Import):
                real |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                real |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        assert set(catalogue.imports(card.source)) == real, card.module


def test_needs_are_all_that_the_code_runs_on() -> None:
    assert set(BY_MODULE["video_rag"].needs) == {"vit", "open_qwen2vl", "piip", "llama", "convnext"}
    assert BY_MODULE["gpt"].needs == ()


def test_phases_are_the_module_s() -> None:
    real = importlib.import_module("foretell.zoo.science.protein_sid")
    assert BY_MODULE["protein_sid"].phases == real.PHASES and BY_MODULE["protein_sid"].samplers == real.SAMPLERS


def test_a_function_of_another_module_is_read_there() -> None:
    assert catalogue.functions(BY_MODULE["perforated"])["loss"] is catalogue.functions(BY_MODULE["resnet"])["loss"]


def test_titles_and_citations() -> None:
    assert BY_MODULE["vit"].title == "Vision Transformer"
    assert BY_MODULE["vit"].citation == 'Dosovitskiy et al., 2020, "An Image is Worth 16x16 Words"'
    assert replace(BY_MODULE["vit"], source='"""Something (of no year): that."""').citation == ""


# ---------------------------------------------------------------- tags


def test_every_entry_has_its_tags_and_every_tag_a_meaning() -> None:
    for card in CARDS:
        for entry in card.entries:
            assert entry.domain and entry.motif and entry.task in tags.TASKS, entry.name
    assert set(tags.SCIENCES) | tags.SYSTEM <= set(BY_MODULE) and not set(tags.SCIENCES) & tags.SYSTEM
    assert {card.level for card in CARDS} == set(tags.LEVELS)


def test_the_catalogue_has_every_entry_once() -> None:
    assert sorted(entry.name for card in CARDS for entry in card.entries) == sorted(zoo.names())


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"task": "seg"}, [entry.name for entry in zoo.ENTRIES.values() if entry.task == "seg"]),
        ({"task": "Segmentation"}, [entry.name for entry in zoo.ENTRIES.values() if entry.task == "seg"]),
        ({"domain": "physics"}, [entry.name for entry in zoo.ENTRIES.values() if tags.SCIENCES.get(entry.module) == "physics"]),
        ({"domain": "graph"}, [entry.name for entry in zoo.ENTRIES.values() if entry.domain == "graph"]),
        ({"motif": "SCATTER"}, [entry.name for entry in zoo.ENTRIES.values() if "scatter" in entry.motif]),
        ({"task": "lm", "domain": "video"}, ["video_rag", "video_rag-tiny"]),
        ({"paper": "hinton"}, ["ff-tiny", "ff-twin-tiny", "ff", "ff-twin"]),
        ({"paper": "PVD-AL"}, ["pvd_al", "pvd_al-tiny"]),
        ({"level": "system", "task": "rl"}, ["grpo_roc", "grpo_roc-tiny"]),
    ],
)
def test_what_is_asked_for_is_found_and_nothing_else(wanted: dict[str, str], expected: list[str]) -> None:
    found = catalogue.select(CARDS, **wanted)
    assert sorted(entry.name for card in found for entry in card.entries) == sorted(expected)
    assert expected


def test_a_name_is_a_module_or_an_entry() -> None:
    assert [entry.name for entry in catalogue.select(CARDS, "kmax")[0].entries] == ["kmax", "kmax-tiny"]
    assert [entry.name for entry in catalogue.select(CARDS, "kmax-tiny")[0].entries] == ["kmax-tiny"]
    assert catalogue.select(CARDS, "nothing") == ()


# ---------------------------------------------------------------- measured rows


def test_rows_reach_their_entries_and_a_cut_line_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    kept = [row("kmax-tiny"), row("gpt-tiny"), row("kmax-tiny", measured_bytes=50)]
    path.write_text("\n".join([json.dumps(kept[0]), '{"name": "kmax-ti', json.dumps(kept[1]), json.dumps(kept[2]), "[]"]))
    cards = {card.module: card for card in catalogue.cards(path)}
    assert list(cards["kmax"].rows) == [kept[0], kept[2]] and list(cards["gpt"].rows) == [kept[1]] and not cards["vit"].rows
    assert catalogue.newest(cards["kmax"].rows) == (kept[2],)
    assert catalogue.select(cards.values(), "kmax")[0].rows == cards["kmax"].rows
    assert catalogue.select(cards.values(), "gpt2")[0].rows == (), "rows of another entry are not its own"
    other = [*kept, row("kmax-tiny", device="NVIDIA H200")]
    assert catalogue.newest(other) == (kept[1], kept[2], other[-1])


@pytest.mark.parametrize(("device", "cpu"), [
    ("Intel(R) Xeon(R) Processor", True), ("AMD EPYC 9654 96-Core Processor", True), ("Apple M2", True), ("cpu", True),
    ("NVIDIA H200", False), ("H100", False), ("AMD Instinct MI300X", False), ("L40S", False), ("NVIDIA GeForce RTX 4090", False),
])  # fmt: skip
def test_which_device_is_a_cpu(device: str, cpu: bool) -> None:
    assert rubric.is_cpu({"device": device}) is cpu


# ---------------------------------------------------------------- the score


GOOD = '''"""Good model (Somebody et al. 2020, "A Good Model").

Kept: {words}
Left out: all else. `kind` is "one" or "two". Phases: first, second.
"""

from torch import Tensor, nn

PHASES = ("first", "second")


def build(*, width: int = 3, kind: str = "one", phase: str = "first") -> nn.Module:
    return nn.Linear(width, width)


def batch(model: nn.Module, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Ones."""
    return {{"input": Tensor(micro_batch, 3)}}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean."""
    return output.mean()
'''.format(words="much " * 40)


def good(source: str = GOOD, **changed: Any) -> Card:
    tagged: dict[str, Any] = {"task": "cls", "motif": "nothing", "trap": "none", **changed}
    entries = tuple(
        zoo.Entry(name, "good", {"width": width}, "text", f"of width {width}", small=width == 3, **tagged)
        for name, width in (("good", 9), ("good-tiny", 3))
    )
    phases = [row("gpt-tiny", phase=phase) | {"name": "good-tiny"} for phase in PHASES_OF_GOOD]
    return Card("good", entries, source, (*phases, {**phases[0], "device": "NVIDIA H200"}))


PHASES_OF_GOOD = ("first", "second")


def test_a_module_with_every_fact_has_every_point() -> None:
    score = rubric.rate(good())
    assert score.lost == () and score.mean == rubric.POINTS == 5
    assert [rating.category for rating in score.ratings] == list(rubric.CATEGORIES) and len(rubric.CATEGORIES) == 6


def test_a_module_with_no_fact_has_none() -> None:
    empty = Card("bare", (zoo.Entry("bare", "bare", {"x": 1}, "", ""),), "import numpy as np\nx = np.random.rand()\n")
    points = {rating.category: rating.points for rating in rubric.rate(empty).ratings}
    assert points["specification"] == points["dataset"] == points["metrics"] == points["reference solution"] == 0
    assert rubric.rate(empty).mean < 1.0


@pytest.mark.parametrize(
    ("card", "lost"),
    [
        (good(GOOD.replace("Kept:", "There:")), "specification: the docstring does not say what is kept"),
        (good(GOOD.replace("Left out:", "Not:")), "specification: the docstring does not say what is left out"),
        (good(GOOD.replace(" 2020,", ",")), "specification: the docstring names no authors with a year"),
        (good(GOOD.replace('"A Good Model"', "A Good Model")), "documentation: the docstring does not give the paper's title"),
        (good(GOOD.replace("much " * 30, "")), "documentation: the docstring has"),
        (good(GOOD.replace("Phases: first, second", "Phases: first")), "documentation: the docstring does not name the phase second"),
        (good(GOOD.replace('`kind` is "one" or "two". ', "")), "documentation: the docstring does not say what kind may be"),
        (good(GOOD.replace('    """Ones."""\n', "")), "dataset: batch does not say what a sample is"),
        (good(GOOD.replace('    """The mean."""\n', "")), "metrics: loss does not say what is minimised"),
        (good(GOOD.replace("from torch import", "import numpy\nfrom torch import")), "software: it imports numpy"),
        (good(GOOD.replace("width: int = 3", "width = 3")), "software: build without types"),
        (good(GOOD.replace("width: int = 3", "width: int")), "reference solution: settings without a default: width"),
        (good(GOOD.replace("width: int = 3", "wide: int = 3")), "reference solution: settings without a default: width"),
        (good(GOOD.replace("Tensor(micro_batch, 3)", "Tensor(2, 3)")), "dataset: all batches are alike"),
        (good(GOOD.replace("return {", "open('x')\n    return {")), "dataset: batch reads what does not come with it (open)"),
        (good(trap=""), "specification: no trap"),
        (good(task=""), "specification: an entry without domain, task or motif"),
        (replace(good(), entries=good().entries[1:]), "reference solution: not both a size for tests and a full one"),
        (replace(good(), rows=good().rows[:2]), "metrics: no row from a GPU"),
        (replace(good(), rows=tuple({**one, "commit": ""} for one in good().rows)), "software: no measured row says torch"),
        (replace(good(), rows=tuple({**one, "status": "fail"} for one in good().rows)), "reference solution: no passed check"),
        (replace(good(), rows=(good().rows[0], {**good().rows[1], "status": "reason"}, good().rows[2])), "reference solution: no passed"),
        (replace(good(), rows=tuple({**one, "predicted_bytes": 107} for one in good().rows)), "reference solution: bytes of good-tiny"),
        (replace(good(), rows=tuple({**one, "predicted_seconds": 0.02} for one in good().rows)), "reference solution: seconds of"),
    ],
)
def test_each_fact_costs_one_point_and_says_so(card: Card, lost: str) -> None:
    score = rubric.rate(card)
    assert len(score.lost) == 1 and score.lost[0].startswith(lost), score.lost
    assert score.mean == pytest.approx(5 - 1 / 6)


def test_a_phase_without_a_row_costs_a_point() -> None:
    rows = [*good().rows[1:2], {**good().rows[1], "device": "NVIDIA H200"}]
    assert rubric.rate(replace(good(), rows=tuple(rows))).lost == ("metrics: no row of the phase first",)
    rows[0] = {**rows[0], "phase": "first+second"}
    assert rubric.rate(replace(good(), rows=tuple(rows))).lost == (), "phases in turn are a row of both"


def test_the_zoo_is_written_down_but_for_what_must_be_measured() -> None:
    """What text and code say is complete; classics of no workload paper have no trap."""
    measured = re.compile(r"row|check|measurement")
    for card in CARDS:
        lost = [text for text in rubric.rate(card).lost if not measured.search(text)]
        assert lost == ([] if card.papers else ["specification: no trap: nothing says what a planner gets wrong of it"]), card.module


# ---------------------------------------------------------------- commands


def test_a_query_gives_code_settings_and_rows_in_one_call() -> None:
    found = answer("zoo", "query", "--task", "seg")
    assert found["asked"] == {"task": "seg"}
    modules = {one["module"]: one for one in found["models"]}
    assert set(modules) == {entry.module for entry in zoo.ENTRIES.values() if entry.task == "seg"}
    kmax = modules["kmax"]
    assert kmax["code"] == (ROOT / "foretell/zoo/perception/kmax.py").read_text(encoding="utf-8")
    assert set(kmax["needs"]) == {"resnet", "vit"} and "class ResNet" in kmax["needs"]["resnet"]
    sizes = {one["name"]: one for one in kmax["hyperparameters"]["models"]}
    assert sizes["kmax-tiny"]["settings"] == dict(zoo.get("kmax-tiny").config)
    assert sizes["kmax"]["all"] == {**kmax["hyperparameters"]["defaults"], **zoo.get("kmax").config}
    rows = [one for one in catalogue.read_rows() if one["name"] in sizes]
    assert kmax["measured"] == rows
    assert [one["name"] for one in modules["piip"]["hyperparameters"]["models"]] == ["piip", "piip-tiny"], "not the language one"


def test_the_listing_has_a_line_for_each_module_and_a_filter_for_each_tag() -> None:
    lines = run("zoo").stdout.splitlines()
    told = [line.split()[0] for line in lines if line.startswith("  ")][1:]
    assert sorted(told) == sorted(BY_MODULE)
    gpt = next(line for line in lines if line.startswith("  gpt "))
    assert " lm " in gpt and " application " in gpt and "(9)" in gpt and zoo.get("gpt2").motif in gpt
    models = answer("zoo", "--domain", "physics", "--level", "scientific", "--task", "gen")["models"]
    assert {one["module"] for one in models} == {"allshowers", "lamarr"}
    assert all(one["science"] == "physics" and 0 < one["score"] <= 5 for one in models)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["zoo", "query", "--task", "segment"], ["no model of the zoo has task 'segment'", "did you mean seg", "there are branch, cls"]),
        (["zoo", "--domain", "fysics"], ["domain 'fysics'", "did you mean physics", "biology"]),
        (["zoo", "--motif", "scater"], ["motif 'scater'", "did you mean scatter", "see `foretell zoo`"]),
        (["zoo", "query", "--task", "seg", "--domain", "text"], ["task 'seg' and domain 'text'", "there is domain driving, image"]),
        (["zoo", "query", "kmax", "--level", "system"], ["name 'kmax' and level 'system'", "there is level application"]),
        (["zoo", "query", "kmaxx"], ["unknown model 'kmaxx'", "kmax"]),
        (["zoo", "query", "--paper", "Hintno"], ["paper 'Hintno'", "see `foretell zoo`"]),
    ],
)
def test_what_is_not_there_is_one_error_with_the_nearest(words: list[str], parts: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert all(part in done.stderr for part in parts), done.stderr


def test_a_query_for_people_says_it_all_without_the_code() -> None:
    text = run("zoo", "query", "protein-sid-tiny").stdout
    for part in ("Distilled Protein Backbone Generation", "task gen; domain points, biology; level scientific", "teacher, score, generator",
                 "pair_dim=512", "protein-sid-tiny", "score", "measured"):  # fmt: skip
        assert part in text
    assert "class " not in text and "protein-sid " not in text


# ---------------------------------------------------------------- the page of papers


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo_table", ROOT / "benchmarks" / "zoo_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_papers_has_a_row_for_each_workload_and_is_up_to_date() -> None:
    table, text = script(), (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    papers = {entry.paper for entry in zoo.ENTRIES.values() if entry.paper}
    assert set(table.WORKLOADS) == papers
    inside = text[text.index(table.START) : text.index(table.END)]
    files = {BY_MODULE[entry.module].file for entry in zoo.ENTRIES.values() if entry.paper}
    assert {f"`{file.removeprefix('foretell/')}`" for file in files} == set(re.findall(r"`zoo/[\w/]+\.py`", inside))
    assert table.page(text, table.table(catalogue.cards())) == text, "run: python benchmarks/zoo_table.py"


def test_a_row_of_the_page_tells_the_worst_figures() -> None:
    table = script()
    rows = (
        row("kmax-tiny"), row("kmax-tiny", phase="b", predicted_bytes=97), row("kmax-tiny", device="NVIDIA H200", predicted_seconds=0.009),
        row("kmax-tiny", phase="c", status="reason", reason="time: the host binds", predicted_seconds=None),
    )  # fmt: skip
    cards = [replace(card, rows=rows if card.module == "kmax" else ()) for card in CARDS]
    line = next(line for line in table.table(cards) if line.startswith("| kMaX-DeepLab "))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[4] == "100 B -3.0 %; 10 ms +10.0 %; kmax-tiny c: time: the host binds" and cells[5] == "100 B +1.0 %; 10 ms -10.0 %"


@pytest.mark.parametrize(("trap", "held", "left"), [
    ("a; not handled: b, since c", "a", "b, since c"), ("a. Not handled: b", "a", "b"), ("a, not b", "a, not b", ""),
])  # fmt: skip
def test_what_is_open_of_a_trap(trap: str, held: str, left: str) -> None:
    assert script().split_trap(trap) == (held, left)
