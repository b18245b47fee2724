"""Slow ranks, slow links and hangs from constructed records with planted faults; rings from hostile bytes."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.errors import UserError
from foretell.plan.types import Mesh, Plan
from foretell.report.html import data as html_data
from foretell.report.html import page as html
from foretell.report.html import ranks as report_ranks
from foretell.report.html import sections as html_sections
from foretell.runtime.detect import findings, hangs, history, layout, links, records, slow
from foretell.runtime.detect import ring as rings
from foretell.runtime.detect.detector import Expectation, StragglerWatch
from foretell.runtime.detect.findings import RunFacts
from foretell.runtime.detect.hangs import Entry, GroupPosition, RankPosition, read_hang
from foretell.runtime.detect.records import StepTable
from foretell.runtime.detect.ring import Ring
from tests.pure import report_sample

# ---------------------------------------------------------------- steps of many ranks


def table(own: np.ndarray, *, first: int = 1, other: np.ndarray | None = None, data: np.ndarray | None = None) -> StepTable:
    """Ranks that meet at the end of every step: each waits for the slowest, and 3 ms for what is sent."""
    zero = np.zeros_like(own)
    other, data = zero if other is None else other, zero if data is None else data
    whole = np.broadcast_to((own + other).max(axis=0) + 0.003, own.shape)
    return StepTable(np.arange(first, first + own.shape[1]), whole, whole - own - other, own, data, other, zero)


def noisy(world: int, steps: int, seed: int) -> np.ndarray:
    """17 ms each; noise of every size a busy machine makes, alike on all ranks: 1 ms of it always, 30 ms now and then."""
    dice = np.random.default_rng(seed)
    own = 0.017 + np.abs(dice.normal(0, 0.001, (world, steps)))
    own += (dice.random((world, steps)) < 0.02) * dice.exponential(0.03, (world, steps))
    return own + (dice.random(steps) < 0.05) * 0.02  # and what slows all of them


def watched(own: np.ndarray, roles: list[str] | None = None) -> list[findings.RankFinding]:
    facts = RunFacts(world=len(own), places={}, several=False)
    watch = StragglerWatch(roles or ["pp0"] * len(own), facts)
    found = []
    for first in range(0, own.shape[1], 13):  # in whatever pieces they come
        found += watch.steps(table(own[:, first : first + 13], first=first + 1))[0]
    return found


MANY = pytest.mark.slow(reason="many ranks, as few ones")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=MANY), pytest.param(16, marks=MANY)])
def test_a_rank_that_is_a_fifth_slower_is_named_within_100_steps_and_nobody_else(world: int) -> None:
    for seed in range(10):
        own = noisy(world, 500, seed)
        rank, first = seed % world, 200 + seed
        own[rank, first:] += 0.004
        (found,) = watched(own)
        assert found.kind == slow.SLOW and found.ranks == (rank,) and first < found.step <= first + 100
        assert 0.12 < found.cost < 0.28 and f"rank {rank}: it works " in found.text


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=MANY), pytest.param(16, marks=MANY)])
def test_a_rank_that_is_slow_now_and_then_is_named_within_500_steps(world: int) -> None:
    """Medians show nothing of it."""
    for seed in range(10):
        own = noisy(world, 800, seed)
        own[seed % world, 100::10] += 0.05
        (found,) = watched(own)
        assert found.kind == slow.INTERMITTENT and found.ranks == (seed % world,) and found.step <= 600
        assert 0.1 < found.cost < 0.4
    assert np.median(own[seed % world]) < 1.1 * np.median(np.delete(own, seed % world, axis=0))


def test_nobody_is_named_in_clean_steps_however_noisy() -> None:
    for world, seed in ((2, 0), (3, 1), (8, 2)):
        assert watched(noisy(world, 3000, seed)) == []


def test_warm_up_evaluation_and_checkpoints_are_nobodys_fault() -> None:
    own = noisy(2, 300, 1)
    own[0, :10] += 1.0
    other = np.zeros_like(own)
    own[1, 50::50] += 0.1  # rank 1 saves, and the step after begins cold
    own[1, 51::50] += 0.1
    other[:, 50::50] = 0.01
    whole = table(own, other=other)
    kept = records.clean(whole, 10)
    brute = [step for step in range(11, 301) if (step - 1) % 50 and (step - 2) % 50]
    assert kept.steps.tolist() == brute
    assert StragglerWatch(["a", "a"], RunFacts(world=2, places={})).steps(whole)[0] == []


def test_ranks_are_compared_with_those_that_do_the_same_and_alone_with_themselves() -> None:
    stages = ["pp0", "pp0", "pp1", "pp1"]
    own = noisy(4, 400, 3)
    own[2:] += 0.02  # a longer stage
    assert watched(own, stages) == []
    own[3, 150:] += 0.005
    (found,) = watched(own, stages)
    assert found.ranks == (3,)
    alone = noisy(2, 600, 4)
    alone[1] += 0.02
    assert watched(alone, ["pp0", "pp1"]) == []
    alone[0, 300:] += 0.02  # slower than it was, though still not slower than the other
    assert {found.ranks for found in watched(alone, ["pp0", "pp1"])} == {(0,)}


def test_excess_is_what_brute_force_finds() -> None:
    own, roles = noisy(5, 40, 7), ["a", "a", "b", "a", "b"]
    excess = slow.excess_of(own, roles)
    for rank, step in itertools.product(range(5), range(40)):
        others = [own[other, step] for other in range(5) if other != rank and roles[other] == roles[rank]]
        assert excess[rank, step] == pytest.approx(own[rank, step] - np.median(others))


def test_a_finding_is_told_once_and_again_after_it_was_gone() -> None:
    own = noisy(2, 900, 5)
    own[1, 100:300] += 0.01
    own[1, 500:700] += 0.01
    assert [found.ranks for found in watched(own)] == [(1,), (1,)]


def test_the_cause_and_the_cost_are_told() -> None:
    own = noisy(2, 200, 6)
    own[1] += 0.005
    data = np.zeros_like(own)
    data[1] = 0.005
    watch = StragglerWatch(["a", "a"], RunFacts(world=2, places={1: "node7, cuda:3"}, price_per_hour=3.0))
    (found,), _ = watch.steps(table(own, data=data))
    assert "rank 1 (node7, cuda:3)" in found.text and "it waits for its next samples" in found.text
    hours = 24 * found.cost
    assert f"{hours:.1f} h of every 24 h on 2 ranks, ${2 * 3 * hours:,.0f} a day" in found.text


def test_steps_slower_than_the_prediction_allows_are_told_once() -> None:
    watch = StragglerWatch(["a", "a"], RunFacts(world=2, places={}), Expectation(step_seconds=0.010, high_seconds=0.012))
    found, _ = watch.steps(table(noisy(2, 400, 8)))
    (one,) = found
    assert one.kind == findings.SLOW_STEP and "10.0 ms (−" in one.text.replace("-", "−") and "12.0 ms at most" in one.text
    inside = StragglerWatch(["a", "a"], RunFacts(world=2, places={}), Expectation(step_seconds=0.020, high_seconds=0.030))
    assert inside.steps(table(noisy(2, 400, 8)))[0] == []


# ---------------------------------------------------------------- links


def _windows(seconds: list[float], count: int = 100) -> list[links.SlowLink]:
    watch, found = links.LinkWatch(), []
    kind = links.TransferClass("dp_shard", "all_gather", 1 << 20)
    dice = np.random.default_rng(0)
    for number, base in enumerate(seconds):
        took = base * (1 + np.abs(dice.standard_cauchy(count)) * 0.1)  # a busy machine: far outliers, upwards alone
        found += watch.window([links.Transfers(kind, np.arange(count) + number * count, took)], 0.02, count)
    return found


def test_a_link_that_becomes_slow_is_told_and_a_busy_machine_is_not() -> None:
    assert _windows([0.002] * 30) == []
    (found,) = _windows([0.002] * 10 + [0.005] * 10)
    assert found.seconds / found.before_seconds == pytest.approx(2.5, rel=0.1) and found.cost == pytest.approx(0.15, rel=0.2)
    assert _windows([0.002] * 10 + [0.0025] * 10) == []  # a quarter longer is not half as long again
    assert "no rank is late, and all_gather of 1.0 MiB over dp_shard takes" in findings.of_link(found, RunFacts(world=2, places={})).text


@pytest.mark.parametrize("world", [3, 4, 8])
def test_a_matrix_tells_link_sender_receiver_and_fabric(world: int) -> None:
    dice = np.random.default_rng(world)
    clean = 1e-3 * (1 + 0.2 * dice.random((world, world)))
    assert links.read_matrix(clean).kind == ""
    for source, target in itertools.permutations(range(world), 2):
        hot = clean.copy()
        hot[source, target] *= 5
        assert links.read_matrix(hot) == links.MatrixReading(links.LINK, (source, target), pytest.approx(5, rel=0.3))
    for rank in range(world):
        row, column = clean.copy(), clean.copy()
        row[rank] *= 5
        column[:, rank] *= 5
        assert (links.read_matrix(row).kind, links.read_matrix(row).ranks) == (links.SENDER, (rank,))
        assert (links.read_matrix(column).kind, links.read_matrix(column).ranks) == (links.RECEIVER, (rank,))
        column[rank] = row[rank]
        assert (links.read_matrix(column).kind, links.read_matrix(column).ranks) == (links.NETWORK, (rank,))
    assert links.read_matrix(clean * 5, usual=1e-3).kind == links.FABRIC
    words = findings.probed(links.read_matrix(hot))
    assert words.startswith(f"probed: from rank {source} to rank {target}, ") and words.endswith("times as long as at the beginning")


# ---------------------------------------------------------------- hangs


def at(
    group: str, entered: int, *, waits: bool, ranks: tuple[int, ...] = (0, 1, 2), op: str = "all_reduce", more: tuple[GroupPosition, ...] = ()
) -> RankPosition:
    recent = tuple(Entry(number, op if number == entered else "all_reduce", "float32", 4096, 7) for number in range(max(1, entered - 3), entered + 1))
    position = GroupPosition(group, f"dp of {group}", ranks, entered, recent)
    return RankPosition((position, *more), group if waits else "", entered if waits else 0, 9.0 if waits else 0.0, 5.0)


def test_who_never_entered_is_named() -> None:
    found = read_hang({0: at("a", 8, waits=True), 1: at("a", 7, waits=False), 2: at("a", 8, waits=True)})
    assert found is not None and (found.kind, found.culprits, found.late) == (hangs.OUTSIDE, (1,), True)
    assert found.problem == "rank 1 never entered all_reduce 8 of dp of a (float32, 4.0 KiB), in which ranks 0, 2 wait"
    assert found.graph[1] == "rank 1 waits in no collective; its last was all_reduce 7 of dp of a"


def test_a_collective_that_all_have_entered_is_a_hang_inside() -> None:
    found = read_hang({rank: at("a", 8, waits=True) for rank in range(3)})
    assert found is not None and (found.kind, found.culprits) == (hangs.INSIDE, ()) and "all ranks of it have entered all_reduce 8" in found.problem


def test_ranks_that_called_different_collectives_are_named_with_both_and_the_odd_one_alone() -> None:
    found = read_hang({0: at("a", 8, waits=True), 1: at("a", 8, waits=True, op="broadcast"), 2: at("a", 8, waits=True)})
    assert found is not None and (found.kind, found.culprits) == (hangs.DESYNC, (1,))
    assert "at collective 8 of dp of a ranks 0, 2 called all_reduce (float32, 4.0 KiB) and rank 1 called broadcast" in found.problem
    shapes = {rank: GroupPosition("a", "a", (0, 1), 3, (Entry(3, "all_reduce", "float32", 64, 1 + rank),)) for rank in range(2)}
    assert hangs.first_difference(shapes) is not None
    apart = {rank: GroupPosition("a", "a", (0, 1), 3, (Entry(3, "all_to_all", "float32", 64 * rank, 1 + rank),)) for rank in range(2)}
    assert hangs.first_difference(apart) is None  # ranks may rightly send unlike amounts


def test_the_chain_is_followed_over_groups_to_the_one_who_waits_for_nobody() -> None:
    """Rank 0 waits for 1 in a, 1 for 2 in b, 2 for 3 in c; 3 does something else."""
    def late(group: str, ranks: tuple[int, ...], entered: int) -> GroupPosition:
        return GroupPosition(group, group, ranks, entered, (Entry(entered, "all_reduce", "float32", 4096, 7),))

    found = read_hang({
        0: at("a", 5, waits=True, ranks=(0, 1)), 1: at("b", 5, waits=True, ranks=(1, 2), more=(late("a", (0, 1), 4),)),
        2: at("c", 5, waits=True, ranks=(2, 3), more=(late("b", (1, 2), 4),)), 3: RankPosition((late("c", (2, 3), 4),)),
    })  # fmt: skip
    assert found is not None and (found.kind, found.culprits, found.waiting) == (hangs.OUTSIDE, (3,), (0, 1, 2))


def test_groups_that_are_used_in_another_order_make_a_circle() -> None:
    def other(group: str, entered: int) -> GroupPosition:
        return GroupPosition(group, group, (0, 1), entered, ())

    both = (0, 1)
    found = read_hang({0: at("a", 5, waits=True, ranks=both, more=(other("b", 4),)), 1: at("b", 5, waits=True, ranks=both, more=(other("a", 4),))})
    assert found is not None and (found.kind, found.culprits) == (hangs.CYCLE, (0, 1))


def test_the_end_of_a_chain_is_what_brute_force_finds() -> None:
    """Random ranks in random groups, each entered once more or not: whoever is named is blocked by nobody, and holds up someone."""
    dice = random.Random(3)
    for _ in range(300):
        world = dice.randrange(2, 6)
        groups = [tuple(sorted(dice.sample(range(world), dice.randrange(2, world + 1)))) for _ in range(3)]
        entered = {(g, r): dice.randrange(3, 5) for g, ranks in enumerate(groups) for r in ranks}
        own = {r: [g for g, ranks in enumerate(groups) if r in ranks] for r in range(world)}
        waits = {r: dice.choice(mine) for r, mine in own.items() if mine and dice.random() < 0.7}
        positions = {
            r: RankPosition(
                tuple(GroupPosition(str(g), str(g), groups[g], entered[g, r], ()) for g in range(3) if r in groups[g]),
                str(waits[r]) if r in waits else "", entered[waits[r], r] if r in waits else 0, 9.0, 5.0,
            ) for r in range(world)
        }  # fmt: skip
        found = read_hang(positions)
        edges = {r: {s for s in groups[g] if entered[g, s] < entered[g, r]} for r, g in waits.items()}
        reach = {r: set(e) for r, e in edges.items()}
        for _ in range(world):
            reach = {r: s | set().union(*(reach.get(x, set()) for x in s)) for r, s in reach.items()}
        if found is None:
            assert not waits
        elif found.kind == hangs.OUTSIDE:
            assert set(found.culprits) == {s for r in waits for s in reach[r] if s not in waits}
        elif found.kind == hangs.INSIDE:
            assert not any(s not in waits for r in waits for s in reach[r]) and any(not reach[r] for r in waits)
        else:
            assert found.kind == hangs.CYCLE and set(found.culprits) == {r for r in waits if r in reach[r]}


def test_a_position_travels_as_json_and_anything_else_is_none() -> None:
    position = replace(at("a", 8, waits=True), place="node, cuda:0")
    assert RankPosition.from_json(json.loads(json.dumps(position.to_json()))) == position
    good = position.to_json()
    groups = (["a", "a", ["x"], 1, []], ["a", "a", [], True, []], ["a", "a", [], 1, [3]], 5)
    for bad in (None, 3, [], {}, [[], "a", -1, 0.0, 0.0, ""], good[:-1], [*good, 1], *([[group], *good[1:]] for group in groups)):
        assert RankPosition.from_json(bad) is None, bad


def test_a_collective_is_late_after_ten_deviations_and_never_before_five_seconds() -> None:
    assert hangs.deadline([]) == hangs.deadline([0.001] * 9) == 5.0
    assert hangs.deadline([20.0, 21.0, 22.0]) == pytest.approx(21 + 10 * 1.4826)


# ---------------------------------------------------------------- files


def _ring(path: Path, rank: int = 0, world: int = 2, rows: int = 3, name: str = "dp") -> None:
    ring = Ring(path, {"format": layout.FORMAT, "rank": rank, "world": world, "host": "h", "device": "cpu", "pid": 1, "role": "pp0", "session": "s"})
    ring.name({"group": 1, "key": "0", "name": name, "ranks": list(range(world))})
    assert ring.memory is not None
    for number in range(1, rows + 1):
        place = layout.RECORDS_AT + layout.ROW_BYTES * (number % layout.RECORD_SLOTS)
        layout.RECORD.pack_into(ring.memory, place, number, number, 10 * number, 10 * number + 1, 10 * number + 5, 64, 1, 1, 1, 1, 1, 2, 0, -1)
        place = layout.STEPS_AT + layout.ROW_BYTES * (number % layout.STEP_SLOTS)
        layout.STEP.pack_into(ring.memory, place, number, number, 10**9 * number, 10**9, 10**8, 0, 0, 0)


def _left(tmp_path: Path, *, hostile: str = "") -> Path:
    """A run folder of two ranks: rank 1 works 40 % of a step longer from step 100 on, and never enters the last collective."""
    run = report_sample.run_folder(tmp_path / "run", Plan(model={"model": "gpt-tiny"}, hardware="CPU", mesh=Mesh(dp_shard=2)), measured=False)
    for rank in range(2):
        _ring(run / layout.FOLDER / layout.file_name(rank), rank, rows=3 - rank, name=hostile or "dp")
    path = run / layout.FOLDER / layout.file_name(0)
    data = bytearray(path.read_bytes())
    layout.TIMES.pack_into(data, layout.RECORDS_AT + layout.ROW_BYTES * 3 + layout.TIMES_AT, 31, 0)
    path.write_bytes(bytes(data))
    rows = [{"steps": [first, first + 9], "step_seconds": 0.02, "excess": [0.0, more], "mean_excess": [0.0, more], "waited": [more, 0.001],
             "delayed": [0.0, 0.0]} for first in range(1, 200, 10) for more in [0.008 if first > 100 else 0.0]]  # fmt: skip
    (run / layout.FOLDER / layout.HISTORY).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"steps"')
    with (run / "log.jsonl").open("a") as log:
        log.write("\n" + json.dumps({"event": "finding", "step": 150, "text": f"slow rank: rank 1 {hostile}"}) + "\n")
    return run


def test_the_report_shows_ranks_over_time_and_who_waited_for_whom_at_the_end(tmp_path: Path) -> None:
    section = report_ranks.ranks(html_data.read(_left(tmp_path)))
    assert section is not None and section.lead.startswith("When it ended: hang outside of communication: rank 1 never entered all_reduce 3 of dp")
    assert section.items[0] == "slow rank: rank 1 "
    assert section.items[1:] == (
        "At the end, rank 0 waits in all_reduce 3 of dp (float32, 64 B) for rank 1",
        "At the end, rank 1 waits in no collective; its last was all_reduce 2 of dp",
    )
    (figure,) = section.figures
    assert figure.chart is not None and len(figure.chart.data["cells"]) == 2 * 20
    hot = {tuple(cell[:2]) for cell in figure.chart.data["cells"] if cell[2] == 1.0}
    assert hot == {(column, 1) for column in range(10, 20)} and figure.table.rows[1][1] == "20 %"


def test_without_history_the_report_has_what_the_rings_hold_and_nothing_breaks_out_of_it(tmp_path: Path) -> None:
    run = _left(tmp_path, hostile=report_sample.HOSTILE)
    text = html.render(html_sections.page(html_data.read(run)))
    assert text.count("<script>") == 2 and "window.harmed=1</script>" not in text and "<img src=x" not in text
    (run / layout.FOLDER / layout.HISTORY).unlink()
    assert len(history.read_history(run)) == 1
    for path in (run / layout.FOLDER).iterdir():
        path.unlink()
    assert history.read_history(run) == [] and history.last_hang(run) is None


def test_any_flipped_bit_of_a_weight_changes_its_sum_and_the_odd_replica_is_named() -> None:
    from foretell.runtime.detect import replicas

    dice = random.Random(0)
    for dtype, count in itertools.product((torch.float32, torch.bfloat16, torch.float64, torch.int8), (1, 7, 64, 1001)):
        tensor = torch.randint(-100, 100, (count,)).to(dtype)
        before = replicas.bit_sums([tensor]).tolist()
        for _ in range(20):
            raw, at = tensor.view(torch.uint8), dice.randrange(tensor.nbytes)
            raw[at] ^= 1 << dice.randrange(8)
            assert replicas.bit_sums([tensor]).tolist() != before
            tensor = torch.randint(-100, 100, (count,)).to(dtype)
            before = replicas.bit_sums([tensor]).tolist()
    one, two = [torch.ones(3), torch.zeros(3)], [torch.zeros(3), torch.ones(3)]
    assert replicas.combined(replicas.bit_sums(one)) != replicas.combined(replicas.bit_sums(two))  # places count
    assert replicas.odd_ranks({0: 5, 1: 5, 2: 7}) == (2,) and replicas.odd_ranks({0: 5, 2: 7}) == (0, 2) and replicas.odd_ranks({0: 5, 1: 5}) == ()
    assert replicas.odd_ranks({0: 1, 1: 1, 2: 2, 3: 2}) == (0, 1, 2, 3)
    assert replicas.replica_sets(Mesh(dp_replicate=2, dp_shard=2)) == [(0, 2), (1, 3)] and replicas.replica_sets(Mesh(dp_shard=4)) == []
    assert replicas.replica_sets(Mesh(pp=2, dp_replicate=3)) == [(0, 1, 2), (3, 4, 5)]
    for cost, step in ((1e-3, 0.02), (0.3, 0.1), (1e-6, 1.0)):
        interval = replicas.interval_for(cost, step)
        assert interval >= replicas.LEAST_STEPS and cost / (interval * step) <= 0.002


def test_a_ring_keeps_the_last_rows_in_order_after_many_rounds(tmp_path: Path) -> None:
    path = tmp_path / layout.FOLDER / layout.file_name(0)
    _ring(path, rows=3 * layout.RECORD_SLOTS + 17)
    found = records.read_ring(path)
    assert found.records["number"].tolist() == list(range(2 * layout.RECORD_SLOTS + 18, 3 * layout.RECORD_SLOTS + 18))
    assert found.steps["step"].tolist()[-1] == 3 * layout.RECORD_SLOTS + 17 and len(found.steps) == layout.STEP_SLOTS
    assert records.read_steps(path).steps.tolist() == found.steps.tolist()


def test_whatever_the_bytes_are_reading_ends_with_rows_or_one_error(tmp_path: Path) -> None:
    folder = tmp_path / layout.FOLDER
    for rank in range(2):
        _ring(folder / layout.file_name(rank), rank, rows=300)
    path, dice = folder / layout.file_name(1), random.Random(5)
    good = path.read_bytes()
    for turn in range(60):
        data = bytearray(good)
        for _ in range(dice.choice((1, 20, 2000))):
            data[dice.randrange(len(data)) if turn % 2 else dice.randrange(6000)] = dice.randrange(256)
        path.write_bytes(bytes(data[: dice.randrange(len(data))] if turn % 7 == 0 else data))
        with contextlib.suppress(UserError):
            records.read_ring(path)
        links.transfers(records.read_all(tmp_path))
        history.read_history(tmp_path)
        history.last_hang(tmp_path)
    (folder / layout.HISTORY).write_bytes(b'{"steps": [1, 2], "step_seconds": 1e999}\n[[[[\n\xff\n' + b"[" * 9000)
    assert isinstance(history.read_history(tmp_path), list)


def test_a_folder_that_takes_no_file_leaves_the_ring_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ring = Ring(tmp_path / "file" / "x.ring", {"format": layout.FORMAT})
    assert ring.path is None and ring.memory is not None


def test_a_run_that_never_began_leaves_nothing_and_what_is_the_users_stays(tmp_path: Path) -> None:
    _ring(tmp_path / layout.FOLDER / layout.file_name(0))
    _ring(tmp_path / layout.FOLDER / layout.file_name(0))
    (tmp_path / layout.FOLDER / "mine").write_text("")
    rings.forget(tmp_path)
    assert [path.name for path in (tmp_path / layout.FOLDER).iterdir()] == ["mine"]


def test_what_the_process_before_wrote_is_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / layout.FOLDER / layout.file_name(0)
    _ring(path, rows=5)
    before = path.read_bytes()
    _ring(path, rows=1)
    assert path.with_name(f"{path.name}.before").read_bytes() == before and len(records.read_ring(path).records) == 1
