"""Pages, the scheduler, loads, and requests by a clock: against brute force, counts that must add up, and queues that are known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from foretell.errors import UserError
from foretell.lower.serving import StepShape
from foretell.simulate.serving.load import Load, Request, load_of
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.records import Limit, Served, quantile, weighted
from foretell.simulate.serving.run import capacity, shape_of, simulated
from foretell.simulate.serving.scheduler import Scheduler, Sequence, Step, StepLimits


def scheduler(pages: int = 24, size: int = 4, running: int = 6, tokens: int = 16) -> Scheduler:
    return Scheduler(Pages(pages, size), StepLimits(running=running, tokens=tokens))


class Named(Scheduler):
    """Goes through every sequence in every step, with pages by their numbers."""


def check(one: Scheduler, step: Step) -> None:
    """What must hold whenever a step is to be computed."""
    held = [page for sequence in one.running for page in sequence.pages]
    assert len(held) - len(set(held)) == 0 or any(sequence.key for sequence in one.running), "only what is shared is held twice"
    assert one.pages.held == len(set(held)) and sum(row.count for row in step) <= one.limits.tokens and len(one.running) <= one.limits.running
    for sequence, start, count in step:
        assert start == sequence.computed and 0 < count <= sequence.length - start
        assert len(sequence.pages) * one.pages.size >= start + count, "a page for every token"
    assert len({id(row.sequence) for row in step}) == len(step)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_all_its_tokens_whatever_happens(seed: int, share: bool) -> None:
    """Requests of any size come, are cancelled, lose their pages; at the end all pages are free."""
    draw = random.Random(seed)
    one = scheduler(pages=draw.randint(8, 30), size=draw.choice([1, 4, 7]), running=draw.randint(1, 8), tokens=draw.randint(8, 40))
    made: list[Sequence] = []
    for number in range(60):
        prompt, most = draw.randint(1, 30), draw.randint(1, 20)
        sequence = Sequence(number, prompt, most)
        if share:
            group = draw.randint(0, 2)
            sequence.key = lambda place, group=group, number=number: (group, place) if place < 3 else (number, place)
        try:
            one.add(sequence)
        except UserError:
            assert prompt + most > one.longest
            continue
        made.append(sequence)
    cancelled = set()
    for _ in range(20_000):
        step = one.step()
        if not step:
            break
        check(one, step)
        one.done(step)
        for row in step:
            if row.sequence.generated >= row.sequence.most and not row.sequence.ended:
                one.end(row.sequence)
        if draw.random() < 0.02:
            victim = draw.choice(made)
            if not victim.ended:
                cancelled.add(victim)
                one.end(victim)
    assert all(sequence.ended for sequence in made) and not one.running and not one.waiting
    assert all(sequence.generated == sequence.most for sequence in made if sequence not in cancelled)
    assert one.pages.held == 0 and one.pages.available == one.pages.count


def test_generating_comes_first_and_prompts_in_pieces() -> None:
    one = scheduler(pages=100, size=4, running=4, tokens=10)
    short, long = Sequence(0, 3, 9), Sequence(1, 25, 2)
    one.add(short)
    one.done(one.step())
    one.add(long)
    shapes = []
    for _ in range(3):
        step = one.step()
        shapes.append(shape_of(step))
        one.done(step)
    assert [(shape.generating, shape.chunks) for shape in shapes] == [(1, ((0, 9),)), (1, ((9, 9),)), (1, ((18, 7),))]
    assert [shape.samples for shape in shapes] == [1, 1, 2] and shapes[0].tokens == 10


def test_the_youngest_gives_its_pages_and_is_computed_anew() -> None:
    one = scheduler(pages=4, size=4, running=4, tokens=16)
    old, young = Sequence(0, 7, 8), Sequence(1, 7, 8)
    one.add(old)
    one.add(young)
    while not one.preemptions:
        one.done(one.step())
    assert one.running == [old] and list(one.waiting) == [young] and young.pages == [] and young.computed == 0 and young.generated == 2


def test_what_can_never_be_served_is_refused_with_what_can() -> None:
    one = scheduler(pages=4, size=4)
    with pytest.raises(UserError, match="all pages hold 16 tokens") as caught:
        one.add(Sequence(0, 12, 5))
    assert "at most 11 tokens of prompt" in caught.value.remedy
    for prompt, most in ((0, 1), (1, 0)):
        with pytest.raises(UserError, match="at least one"):
            one.add(Sequence(0, prompt, most))
    with pytest.raises(UserError, match="a step of 2 tokens"):
        StepLimits(running=3, tokens=2)


def test_pages_of_the_same_beginning_are_held_once_and_found_again() -> None:
    pages = Pages(4, 2)
    first = pages.take(2)
    pages.name(first[0], "a")
    pages.name(first[1], "ab")
    assert pages.shared(["a", "ab", "abc"]) == first and pages.available == 2
    pages.give_back(first)
    assert pages.available == 2
    pages.give_back(first)
    assert pages.available == 4 and pages.shared(["a"]) == first[:1]
    pages.give_back(first[:1])
    pages.take(4)  # what was kept is given up for it
    assert pages.shared(["a"]) == [] and pages.available == 0
    with pytest.raises(ValueError, match="1 pages of 0"):
        pages.take(1)


# ---------------------------------------------------------------------- by a clock


def seconds(shape: StepShape) -> float:
    return 0.004 + 1e-7 * shape.attended + 2e-5 * shape.tokens


def figures(served: Served) -> list[object]:
    answers = [(one.came, one.prompt, one.output, one.first, one.last, one.preempted) for one in served.answers]
    counts = (served.steps, served.refused, served.preemptions, served.pages_most, served.waiting_most, served.running_most, served.gave_up)
    return [answers, counts, served.seconds, served.busy, sorted(served.gaps), served.timeline]


@pytest.mark.parametrize(
    "text", ["rate=6, in=200±100, out=60±30", "users=9, in=50..300, out=40", "all=40, in=100, out=8..120", "rate=9, in=1..3, out=1..2"]
)
@pytest.mark.parametrize(("pages", "size", "running", "tokens"), [(2000, 16, 8, 256), (80, 16, 8, 256), (45, 8, 20, 33), (400, 1, 7, 7)])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_run_by_counts_is_that_step_by_step_bit_for_bit(text: str, pages: int, size: int, running: int, tokens: int, invariant: bool) -> None:
    limits = StepLimits(running=running, tokens=tokens, invariant=invariant)
    quick, slow = (simulated(load_of(text), kind(Pages(pages, size), limits), seconds, 20.0) for kind in (Scheduler, Named))
    assert figures(quick) == figures(slow)
    assert slow.answers or slow.refused


@pytest.mark.parametrize("seed", range(40))
def test_the_same_where_pages_are_short_and_sizes_odd(seed: int) -> None:
    draw = random.Random(seed)
    first, whole = seed % 3 == 1, seed % 5 == 1
    many = draw.randint(1, 12)
    limits = StepLimits(running=many, tokens=many + draw.randint(0, 40), ahead=seed % 2 == 1, prompts_first=first, reserves=whole,
                        invariant=seed % 5 > 2 and not first)  # fmt: skip
    pages, size = draw.randint(12, 60), draw.choice([1, 2, 5, 16])
    text = f"{draw.choice(['rate=20', 'users=6', 'all=30'])}, in=1..{draw.randint(2, 60)}, out=1..{draw.randint(1, 40)}, seed={seed}"
    found = [simulated(load_of(text), kind(Pages(pages, size), limits), seconds, 6.0, most_waiting=40) for kind in (Scheduler, Named)]
    assert figures(found[0]) == figures(found[1])


@pytest.mark.parametrize("kind", [Scheduler, Named])
def test_who_comes_while_a_step_is_computed_waits_for_the_one_after_that(kind: type[Scheduler], tmp_path: Path) -> None:
    """Where steps are decided one ahead: steps of 0.1 s, a request at 0 and one at 0.05; and one user who asks again at once."""
    table = tmp_path / "trace.csv"
    table.write_text("time,in,out\n0,4,10\n0.05,4,10\n")
    for ahead, first in ((False, 0.15), (True, 0.25)):
        made = kind(Pages(100, 16), StepLimits(running=8, tokens=64, ahead=ahead))
        found = simulated(load_of(str(table)), made, lambda _: 0.1, 5.0)
        assert sorted(one.ttft for one in found.answers) == pytest.approx([0.1, first])
    for ahead, first in ((False, 0.1), (True, 0.1)):  # alone nothing is decided while its last step is computed
        made = kind(Pages(100, 16), StepLimits(running=8, tokens=64, ahead=ahead))
        found = simulated(load_of("users=1, in=4, out=3"), made, lambda _: 0.1, 1.0)
        assert [one.ttft for one in found.answers] == pytest.approx([first] * len(found.answers))


def test_prompts_that_begin_alike_compute_it_once() -> None:
    """A prefix of whole pages is found in all prompts but the first, and nothing else is."""
    alone, shared = (simulated(load_of(f"all=20, in=100, out=8{more}"), scheduler(pages=200, running=20, tokens=400), seconds, 1.0)
                     for more in ("", ", prefix=64"))  # fmt: skip
    assert shared.busy < 0.7 * alone.busy and len(shared.answers) == len(alone.answers) == 20


def test_one_at_a_time_waits_as_long_as_queues_are_known_to() -> None:
    """Poisson arrivals, one server, equal service: the mean wait is load · service / (2 (1 - load))."""
    service, rate = 0.1, 6.0
    one = Scheduler(Pages(1000, 16), StepLimits(running=1, tokens=64))
    found = simulated(Load(kind="rate", amount=rate, prompt=load_of("all=1, in=10, out=1").prompt, seed=3), one, lambda _: service, 6000.0)
    waits = [answer.ttft - service for answer in found.answers]
    load = rate * service
    assert sum(waits) / len(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.06)
    assert len(found.answers) == pytest.approx(rate * 6000, rel=0.02)


def test_capacity_is_the_rate_above_which_limits_break() -> None:
    """Steps of 10 ms for any number up to 8 sequences of 10 tokens: 80 requests a second, less what waiting costs."""
    load = load_of("rate=1, in=4, out=10")

    def made() -> Scheduler:
        return Scheduler(Pages(1000, 16), StepLimits(running=8, tokens=64))

    found = capacity(load, made, lambda _: 0.01, Limit(ttft=0.5), 60.0)
    assert found is not None
    rate, served = found
    assert 60 < rate <= 80.5 and served.inside(Limit(ttft=0.5)) >= 0.95
    assert simulated(load.at_rate(rate * 1.25), made(), lambda _: 0.01, 60.0).inside(Limit(ttft=0.5)) < 0.95
    assert capacity(load, made, lambda _: 0.01, Limit(ttft=0.001), 60.0) is None


def test_counts_and_quantiles() -> None:
    assert quantile([4, 1, 3, 2], 0.5) == 2.5 and quantile([], 0.5) == 0.0 and quantile([7], 0.99) == 7
    assert weighted([(1.0, 1), (2.0, 98), (3.0, 1)], 0.5) == 2.0 and weighted([(1.0, 1), (2.0, 98), (3.0, 1)], 0.995) == 3.0
    found = simulated(load_of("all=5, in=10, out=4"), scheduler(pages=100), seconds, 1.0)
    assert sum(answer.output for answer in found.answers) == 20 and found.refused == 0
    assert found.output_rate == pytest.approx(20 / found.seconds) and found.total_rate == pytest.approx(70 / found.seconds)
    refused = simulated(load_of("all=3, in=500, out=4"), scheduler(), seconds, 1.0)
    assert refused.refused == 3 and refused.inside(Limit()) == 0.0


# ---------------------------------------------------------------------- loads


def test_a_load_is_what_it_says(tmp_path: Path) -> None:
    load = load_of("rate=8, in=1024±512, out=256±128")
    drawn = list(load.requests(500.0))
    assert len(drawn) == pytest.approx(4000, rel=0.05) and [one.at for one in drawn] == sorted(one.at for one in drawn)
    assert sum(one.prompt for one in drawn) / len(drawn) == pytest.approx(1030, rel=0.03) and min(one.output for one in drawn) >= 1
    assert drawn == list(load_of("rate=8, in=1024+-512, out=256±128, seed=0").requests(500.0)) != list(load_of(f"{load}, seed=1").requests(500.0))
    assert {one.prompt for one in load_of("all=300, in=3..5, out=2").requests(1.0)} == {3, 4, 5}
    table = tmp_path / "trace.csv"
    table.write_text("time,in,out\n0,10,2\n1.5,20,3\n4,5,1\n")
    lines = tmp_path / "trace.jsonl"
    lines.write_text('{"time": 0, "in": 10, "out": 2}\n{"time": 1.5, "in": 20, "out": 3}\n{"time": 4, "in": 5, "out": 1}\n')
    assert load_of(str(table)) == load_of(str(lines)) and load_of(str(table)).recorded[1] == Request(1.5, 20, 3)
    assert load_of(str(table)).rate == 0.5 and load_of(str(table)).at_rate(1.0).recorded[-1].at == 2.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "needs one of"), ("rate=8", "needs one of"), ("rate=8, users=2, in=1, out=1", "needs one of"), ("rate=x, in=1, out=1", "no number"),
        ("rate=-1, in=1, out=1", "rate is -1"), ("users=1.5, in=1, out=1", "users is 1.5"), ("rate=nan, in=1, out=1", "no number"),
        ("rate=1, in=0, out=1", "no length"), ("rate=1, in=5..2, out=1", "lengths from 5 to 2"), ("rate=1, in=1, out=1, in=2", "says nothing"),
        ("speed=3", "says nothing"), ("no/such.csv", "cannot be read"),
    ],
)  # fmt: skip
def test_a_load_that_says_nothing_is_one_line(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_of(text)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("time,in,out\n2,1,1\n1,1,1\n", "before the row above"), ("a,b\n1,2\n", "has no time"), ("time,in,out\n", "no requests"),
        ("time,in,out\n0,0,1\n", "at least one token"), ("time,in,out\nnan,1,1\n", "times from 0"), ("time,in,out\n-1,1,1\n", "times from 0"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_is_one_line(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "trace.csv").write_text(content)
    with pytest.raises(UserError, match=told):
        load_of(str(tmp_path / "trace.csv"))
