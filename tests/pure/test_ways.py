"""What each way of working is worth: sessions of a scripted model with it and without it, replayed from their transcripts.

The transcripts are in tests/data/kernels; kernels in them were verified and timed when they were recorded. After a prompt was changed
`python -m tests.pure.test_ways --write` records them anew, and so does a slow test, over HTTP.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.errors import FileFormatError
from foretell.tune.clock.measure import TimingOptions
from foretell.tune.generate import prompts
from foretell.tune.generate.budget import SessionBudget
from foretell.tune.generate.curate import curated
from foretell.tune.generate.gym import KernelGym
from foretell.tune.generate.memory import TunerMemory
from foretell.tune.generate.replay import replayed
from foretell.tune.generate.rounds import KernelSession, SessionAnswer, SessionOptions, head_of
from foretell.tune.generate.score import score
from foretell.tune.generate.talk import TextGenerator
from foretell.tune.generate.transcript import RecordedGenerator, TranscriptWriter
from foretell.tune.generate.ways import Ways
from foretell.tune.search.trial import Trials
from foretell.tune.verify.process import KernelSetting
from foretell.tune.verify.source import Code
from foretell.tune.verify.types import HarnessOptions
from tests.pure.scripted import LIKE, PRICES, TASK, ScriptedModel, cheat, served, through, whole

FOLDER = Path(__file__).parents[1] / "data" / "kernels"
NONE = Ways(strategy=False, judge=False, gym=True, memory=False, ranked=False, audit=True)
SESSIONS: dict[str, tuple[str, Ways, str]] = {
    "strategy": ("strategy", replace(NONE, strategy=True), TASK), "no-strategy": ("strategy", NONE, TASK),
    "judge": ("judge", replace(NONE, judge=True), TASK), "no-judge": ("judge", NONE, TASK),
    "gym": ("gym", NONE, TASK), "no-gym": ("gym", replace(NONE, gym=False), TASK),
    "memory-first": ("memory", replace(NONE, memory=True), TASK), "memory-second": ("memory", replace(NONE, memory=True), LIKE),
    "no-memory-second": ("memory", NONE, LIKE),
    "ranked": ("ranked", replace(NONE, ranked=True), TASK), "no-ranked": ("ranked", NONE, TASK),
    "audit": ("audit", replace(NONE, gym=False), TASK), "no-audit": ("audit", replace(NONE, gym=False, audit=False), TASK),
}  # fmt: skip
"""Name of a transcript → scenario, ways, task. The audit is tried where no gym refuses the cheat before it."""
ROUNDS = 4
BACKEND = "cpu, for tests"


def made(name: str, folder: Path, generator: TextGenerator | None = None, memory: TunerMemory | None = None) -> SessionAnswer:
    """A session, recorded."""
    scenario, ways, task = SESSIONS[name]
    code = Code(path="task.py", text=task, kind="Model")
    asked = HarnessOptions(seed=1, gradients=False)
    with Trials(code, KernelSetting(), asked, TimingOptions(pairs=10, l2_bytes=1 << 12)) as trials:
        options = SessionOptions(task=task, ops=tuple(sorted(set(trials.ops))), backend=BACKEND, ways=ways, rounds=ROUNDS)
        gym = KernelGym(trials, honest=ways.gym, audit=ways.audit)
        budget = SessionBudget(10.0, None, PRICES)
        writer = TranscriptWriter(folder / f"{name}.jsonl", head_of(options, memory, budget))
        try:
            model = RecordedGenerator(generator or ScriptedModel(scenario), budget, writer)
            return KernelSession(options, model, gym, budget, memory, writer).run()
        finally:
            writer.close()
            gym.end()


def record(folder: Path, only: Sequence[str] = ()) -> None:
    """All of them, or some; the second pass of the memory needs the first."""
    memory = TunerMemory("cpu")
    for name, (_, ways, _) in SESSIONS.items():
        if only and name not in only:
            continue
        found = made(name, folder, memory=memory if ways.memory else None)
        best = f"{found.best.speedup:.2f}" if found.best else "nothing"
        print(f"{name:18} {best:>8} {found.tries} of {found.asked} tries; {found.ended}")


def again(name: str) -> SessionAnswer:
    return replayed(FOLDER / f"{name}.jsonl")[0]


def text_of(found: SessionAnswer) -> str:
    return found.best.text if found.best is not None else ""


# ---------------------------------------------------------------- each way beside its absence


def test_a_strategy_solves_what_one_shot_does_not() -> None:
    """Three steps, one of them wrong and taken back; asked for everything at once, the model is wrong every time."""
    found, without = again("strategy"), again("no-strategy")
    assert text_of(found) == whole() and found.kept == ("do four rows at a time", "do all rows at once")
    assert found.taken_back[0] == "drop the epsilon" and found.variants[0].measured.result.status == "refused"
    assert without.best is None and without.right == 0 and without.asked == ROUNDS


def test_a_step_that_was_taken_back_is_not_in_what_comes_after() -> None:
    found = again("strategy")
    asked = [json.loads(line) for line in (FOLDER / "strategy.jsonl").read_text().splitlines()[1:]]
    coder = [row["prompt"][1]["content"] for row in asked if row["kind"] == "asked" and row["role"] == "coder"]
    assert found.variants[0].text not in "".join(coder[1:]) and "# four at a time" in coder[2]


def test_a_judge_who_sees_counters_leads_to_a_faster_kernel() -> None:
    found, without = again("judge"), again("no-judge")
    assert text_of(found) == whole() and "a loop" in text_of(without)
    assert found.best is not None and without.best is not None and found.best.speedup > 2 * without.best.speedup
    assert found.variants[0].measured.counters["ops"]["vdot"] == 24


def test_a_gym_gives_a_pass_through_nothing() -> None:
    found, without = again("gym"), again("no-gym")
    assert found.variants[0].text == through() and found.variants[0].measured.reward == 0.0
    assert found.variants[0].measured.result.check == "passthrough" and text_of(found) == whole()
    assert text_of(without) == through() and without.variants[0].measured.reward > 0.5


def test_memory_makes_a_second_pass_need_fewer_tries() -> None:
    first, second, without = again("memory-first"), again("memory-second"), again("no-memory-second")
    assert (first.tries, second.tries, without.tries) == (3, 1, 3)
    assert text_of(second) == text_of(without) == whole("1e-4")


def test_ranked_variants_are_combined() -> None:
    found, without = again("ranked"), again("no-ranked")
    assert text_of(found) == whole() and text_of(without) != whole()
    assert found.best is not None and without.best is not None and found.best.speedup > 1.5 * without.best.speedup


def test_an_audit_sees_through_what_is_too_good() -> None:
    found, without = again("audit"), again("no-audit")
    assert found.variants[0].text == cheat() and found.variants[0].measured.result.stage == "audit" and text_of(found) == whole()
    assert text_of(without) == cheat() and without.best is not None and without.best.speedup > 10


def test_scores_of_sessions() -> None:
    found = score([again(name) for name in ("strategy", "judge", "ranked", "no-strategy")])
    assert (found.tasks, found.at_first, found.solved, found.kernels) == (4, 0.5, 0.75, 16)
    assert dict(found.faster)[2.0] == 0.75 and found.geometric_mean > 2 and found.money > 0


# ---------------------------------------------------------------- replays


@pytest.mark.parametrize("name", SESSIONS)
def test_a_transcript_replays_to_the_last_decision(name: str) -> None:
    """As it was recorded: the file's own rows say what was measured and spent."""
    rows = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()[1:]]
    found = again(name)
    assert [one.text for one in found.variants] == [row["text"] for row in rows if row["kind"] == "measured"]
    assert found.calls == sum(row["kind"] == "asked" for row in rows) and found.ended == f"{ROUNDS} rounds are over"
    assert found.spent == pytest.approx(sum(row["answer"]["money"] for row in rows if row["kind"] == "asked"))
    assert again(name) == found


def test_a_prompt_that_changed_does_not_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_RULES", "Other rules")
    with pytest.raises(FileFormatError, match=r"strategy\.jsonl, line 3: another question is asked"):
        again("strategy")


def test_a_transcript_that_was_cut_off_replays_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = (FOLDER / "strategy.jsonl").read_text().splitlines()
    path = tmp_path / "cut.jsonl"
    path.write_text("\n".join(lines[:8]) + '\n{"kind": "as')
    found = replayed(path)[0]
    assert found.ended == "the transcript ends here" and len(found.variants) == 2


@pytest.mark.parametrize("row", [
    "[]", "{}", '{"kind": "asked"}', '{"kind": "measured", "sha256": 3}', '{"kind": "asked", "role": "strategist", "at": "x"}',
])  # fmt: skip
def test_a_hostile_row_is_one_line(row: str, tmp_path: Path) -> None:
    lines = (FOLDER / "strategy.jsonl").read_text().splitlines()
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([lines[0], row, *lines[2:]]) + "\n")
    with pytest.raises(FileFormatError) as caught:
        replayed(path)
    assert "\n" not in str(caught.value) and "bad.jsonl" in str(caught.value)


@pytest.mark.parametrize("head", [
    "", "{}", '{"foretell-transcript": 1}', '{"foretell-transcript": 2}', '{"foretell-transcript": 1, "options": []}', "\xff",
])  # fmt: skip
def test_a_hostile_head_is_one_line(head: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(head.encode("latin-1") + b"\n")
    with pytest.raises(FileFormatError) as caught:
        replayed(path)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- curation


def test_a_data_set_has_each_idea_once() -> None:
    """Of all transcripts: near-duplicates are most of what is right."""
    paths = sorted(FOLDER.glob("*.jsonl"))
    found, without = curated(paths), curated(paths, deduplicate=False)
    assert found.duplicates > len(found.rows) and len(without.rows) == len(found.rows) + found.duplicates
    assert found.seen == found.wrong + found.slow + found.duplicates + found.overlapping + len(found.rows)
    kernels = [(one.task, one.kernel) for one in found.rows]
    assert (TASK, whole()) in kernels and (LIKE, whole("1e-4")) in kernels and all("wrong" not in text for _, text in kernels)
    assert [one.speedup for one in found.rows] == sorted((one.speedup for one in found.rows), reverse=True)
    assert found.words_and_right is not None and -1 <= found.words_and_right <= 1


def test_tasks_of_a_benchmark_are_left_out() -> None:
    paths = sorted(FOLDER.glob("*.jsonl"))
    found = curated(paths, held_out=[TASK.replace("\n\n", "\n")])
    assert found.overlapping > 0 and {one.task for one in found.rows} == {LIKE}


# ---------------------------------------------------------------- recorded anew


@contextmanager
def over_http(scenario: str) -> Iterator[TextGenerator]:
    from foretell.tune.generate.endpoint import HttpEndpoint

    with served(scenario) as server:
        yield HttpEndpoint(url=server.url, model="scripted")


@pytest.mark.slow(reason="the transcripts of such sessions are replayed above")
@pytest.mark.parametrize("name", ["strategy", "judge", "gym", "audit"])
def test_a_session_over_http_goes_as_it_was_recorded(name: str, tmp_path: Path) -> None:
    """With kernels verified and timed here: the same best kernel, and a transcript that replays to the same answer."""
    with over_http(SESSIONS[name][0]) as generator:
        found = made(name, tmp_path, generator)
    assert text_of(found) == text_of(again(name))
    repeated = replayed(tmp_path / f"{name}.jsonl")[0]
    assert replace(repeated, seconds=0) == replace(found, seconds=0)


if __name__ == "__main__" and "--write" in sys.argv:
    FOLDER.mkdir(exist_ok=True)
    record(FOLDER, [word for word in sys.argv[1:] if word != "--write"])
