"""What leaves a device that is too small: held against trying everything, and against what the lanes must take at least."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.probe import updates
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster
from foretell.lower.offload.states import StateUnit
from foretell.plan.recipe import recipe_of, source_of
from foretell.plan.states import CHUNK
from foretell.plan.types import MASTER, Mesh, Plan
from foretell.price import offload
from foretell.price.offload import OffloadBytes, Rates
from foretell.search.offload.found import Spilled, fewest
from foretell.search.offload.plans import or_moved, spilled
from foretell.search.offload.search import Spill, meshes, spill
from foretell.search.offload.words import helps, lines
from foretell.search.solve.choice import Choice
from foretell.search.solve.question import Question
from foretell.search.space.caps import host_of, size_of
from foretell.search.space.constraints import SearchConstraints, check
from foretell.search.traces.needed import ModelFacts, Traces
from foretell.simulate.offload.timing import Mark, Marks, played
from foretell.simulate.plan import Options
from foretell.trace.load.model import Source, load
from foretell.trace.record.capture import capture
from foretell.trace.types import Trace
from foretell.units import GIB, MIB

OPTIONS = Options(profile_of=functools.cache(find_profile))
BYTES = Options()
"""Without seconds, for what is about bytes alone."""
MODEL = "gpt-10m"
MADE: dict[Any, Trace] = {}


class Here(Traces):
    """Traces made in this process."""

    def of(self, plan: Plan, modes: Iterable[str]) -> dict[str, Trace]:
        return {mode: self._made(plan, mode) for mode in modes}

    def prepare(self, plans: Iterable[tuple[Plan, str]]) -> None:
        pass

    def _made(self, plan: Plan, mode: str) -> Trace:
        recipe = replace(recipe_of(plan, mode), accumulate=1, compile="none", shards=1)
        key = (recipe, repr(source_of(plan)))
        if key not in MADE:
            MADE[key] = capture(lambda: load(source_of(plan)), recipe, capability=(9, 0))
        self.facts = ModelFacts({"weight": ((2, 2), "float32")}, ())
        return MADE[key]


def question(cap: int | None = None, options: Options = OPTIONS, on: str = "H200", **wishes: Any) -> Question:
    asked = SearchConstraints(**{"precision": MASTER, "global_batch": 8, "micro_batch": 8, "host": 8 * GIB, **wishes})
    cluster = parse(on)
    if cap is not None:
        cluster = replace(cluster, device=cluster.device.with_memory(cap, "a cap"))
    return Question(Source(model=MODEL, overrides={"layers": 6}), cluster, "H200", asked, options, Here(capability=(9, 0)), lambda _: None)


def search(cap: int | None = None, **more: Any) -> Spill:
    asked = question(cap, **more)
    found = Spill(asked.source, asked.cluster, asked.hardware, asked.wishes, asked.options, asked.traces, asked.progress)
    found._begin((8, 1))
    return found


@functools.cache
def smallest(mode: str, **more: Any) -> int:
    """Bytes of the smallest device for a plan with all states away, on which one with none away does not fit."""
    low, high = 900 * MIB, 1300 * MIB
    while high - low > 8 * MIB:
        middle = (low + high) // 2
        one = search(middle, options=BYTES, **more)
        low, high = (low, middle) if one.priced(one.plan((8, 1, mode), one.most)).cost.fits else (middle, high)
    one = search(high, options=BYTES, **more)
    assert not one.priced(one.plan((8, 1, mode))).cost.fits
    return high


# ---------------------------------------------------------------------- the fewest


def test_the_fewest_is_found_from_any_guess_in_few_questions() -> None:
    for most, least in itertools.product(range(1, 40), range(1, 42)):
        for guess in {1, least - 1, least, least + 1, most}:
            asked: list[int] = []

            def enough(number: int, least: int = least, asked: list[int] = asked) -> bool:
                asked.append(number)
                return number >= least

            assert fewest(most, enough, guess) == (least if least <= most else None)
            assert len(asked) <= (3 if guess == least else 14) and len(set(asked)) == len(asked)


@pytest.mark.slow(reason="every number of states costed; that the fewest is found is tested above with made-up ones")
@pytest.mark.parametrize("mode", [pytest.param("keep", marks=pytest.mark.slow(reason="states leave as where blocks are recomputed")), "recompute"])
def test_as_many_states_leave_as_trying_every_number_says(mode: str) -> None:
    whole = search(options=BYTES)
    all_, none = (whole.priced(whole.plan((8, 1, mode), n)).cost.worst.memory.device_bytes for n in (0, whole.most))
    assert none < all_
    wanted = set()
    for part in (0.05, 0.3, 0.5):
        one = search(int((none + (all_ - none) * part) * 1.05), options=BYTES)
        settled = one._settled((8, 1, mode))
        fits = [one.priced(one.plan((8, 1, mode), n)).cost.fits for n in range(one.most + 1)]
        least = next((n for n, fine in enumerate(fits) if fine and n), None)
        assert (settled is None and least is None) or (settled is not None and one._away(settled.plan) == least)
        assert fits[1:] == sorted(fits[1:])
        wanted.add(least)
    assert len(wanted) > 1


def test_the_last_blocks_go_first_and_what_is_in_none_last() -> None:
    one = search()
    orders = [one.plan((8, 1, "keep"), n).states for n in range(one.most + 1)]
    assert orders[0] == {} and orders[1] == {"blocks.5": "host"} and orders[2] == {"blocks.4-5": "host"}
    assert orders[6] == {"blocks.0-5": "host"} and orders[7] == {"blocks.0-5": "host", "rest": "host"}


# ---------------------------------------------------------------------- the answer


def test_nothing_moves_where_everything_fits() -> None:
    found = spill(question(host=None))
    assert found.best is not None and found.best.plan.states == {} and found.best.plan.blocks == {}
    assert "everything is on the device" in lines(found)[0]


def slow(name: str, *more: dict[str, Any]) -> Profile | None:
    """A profile whose link takes far longer than a step of this model, which a host takes milliseconds to ask for, and whose CPU
    nobody measured."""
    profile = find_profile(name)
    if profile is None:
        return None
    kept = [copy for copy in profile.copies if not copy["name"].endswith("-beside") and copy["name"] != "adamw"]
    return replace(profile, copies=(*kept, {"name": "duplex", "bytes": 20 * 10**9, "seconds": 10.0}, *more))


@functools.cache
def squeezed() -> Spilled:
    return spill(question(smallest("recompute") + 16 * MIB, options=Options(profile_of=functools.cache(slow))))


def test_the_best_fits_and_none_that_was_costed_and_fits_is_better() -> None:
    found = squeezed()
    assert found.best is not None and found.best.fits and found.best.plan.states
    assert found.best.cost.worst.memory.host_bytes > found.best.moved_bytes > 0
    assert all(one.fits for one in found.tried) and found.best.cost.time is not None
    assert all(one.cost.time is not None and one.cost.time.step_seconds >= 0.95 * found.best.cost.time.step_seconds for one in found.tried)
    told = lines(found)
    assert "in host memory" in told[0] and "the link is busy" in told[0] and "times as long" in told[1]


def test_a_host_that_is_too_small_or_unknown_is_said() -> None:
    least = squeezed().best
    assert least is not None
    cap = least.cost.worst.memory.capacity_bytes
    found = spill(question(cap, host=1 * GIB))
    assert found.best is None and found.nearest is not None
    with pytest.raises(UserError, match="not known") as error:
        spill(question(cap, host=None))
    assert "--host" in str(error.value)
    assert host_of(parse("H200"), SearchConstraints()) is None and host_of(parse("H200"), SearchConstraints(host=5)) == 5


@pytest.mark.slow(reason="another search without an answer; who holds the bytes is told in test_choose.py")
def test_nothing_fits_says_who_holds_the_bytes_and_what_would_help() -> None:
    choice = spilled(question(600 * MIB))
    assert choice.best is None and choice.infeasible is not None and choice.infeasible.holders
    assert choice.tried == 4 and choice.relaxations == (), "each format was tried, and none is enough"
    mixed = spill(question(600 * MIB, precision=None))
    assert [flag for flag, *_ in helps(mixed, SearchConstraints())][:2] == [f"--precision {MASTER}", f"--precision {MASTER} --state-format split"]


def test_what_is_said_to_help_was_tried_and_does() -> None:
    """A host that is too small for states in fp32: more of it, or smaller states, of which the first that will do is named."""
    least = squeezed().best
    assert least is not None
    cap = least.cost.worst.memory.capacity_bytes
    asked = question(cap, host=least.host_bytes - 100 * MIB)
    choice = spilled(asked)
    assert choice.best is None and choice.relaxations and choice.tried >= len(choice.relaxations)
    for one in choice.relaxations:
        assert one.verdict in ("fits", "tight") and one.memory_bytes <= one.capacity_bytes
        name, value = one.flag.split()[-2:]
        wishes = {"host": size_of("host", value)} if name == "--host" else {"state_format": value}
        assert spilled(replace(asked, wishes=replace(asked.wishes, **wishes))).best is not None


# ---------------------------------------------------------------------- several devices


def test_devices_share_all_parameters_or_those_of_a_machine() -> None:
    plain, two = SearchConstraints(), parse("2x8xH200")
    assert meshes(parse("H200"), plain) == [Mesh()]
    assert meshes(parse("4xH200"), plain) == [Mesh(dp_shard=4)]
    assert meshes(two, plain) == [Mesh(dp_shard=16), Mesh(dp_replicate=2, dp_shard=8)]
    assert meshes(two, SearchConstraints(fixed={"dp_shard": 4})) == [Mesh(dp_replicate=4, dp_shard=4)]
    assert meshes(two, SearchConstraints(fixed={"dp_replicate": 16, "dp_shard": 16})) == []
    assert meshes(two, SearchConstraints(fixed={"tp": 2})) == []


def shared(part: float | None = None, **wishes: Any) -> tuple[Question, Spill]:
    """Two devices that share a model whose states are larger than their buffers, with room for a part of these."""
    asked = question(on="2xH200", options=BYTES, **{"global_batch": 8, "micro_batch": 4, **wishes})
    asked = replace(asked, source=Source(model="gpt2", overrides={"layers": 8, "dim": 1024, "heads": 8, "vocab_size": 512}, seq=64))

    def made() -> Spill:
        found = asked.into(Spill, mesh=Mesh(dp_shard=2))
        found._begin((4, 1))
        return found

    if part is None:
        return asked, made()
    whole = made()
    all_, none = (whole.priced(whole.plan((4, 1, "keep"), n)).cost.worst.memory.device_bytes for n in (0, whole.most))
    assert none < 0.9 * all_
    device = asked.cluster.device.with_memory(int((none + (all_ - none) * part) * 1.06), "a cap")
    asked = replace(asked, cluster=replace(asked.cluster, device=device))
    return asked, made()


@pytest.mark.slow(reason="every number of states costed; that the fewest is found is tested above with made-up ones")
def test_states_of_ranks_leave_as_few_as_trying_every_number_says() -> None:
    wanted = set()
    for part in (0.1, 0.5):
        asked, mine = shared(part)
        settled = mine._settled((4, 1, "keep"))
        fits = [mine.priced(mine.plan((4, 1, "keep"), n)).cost.fits for n in range(mine.most + 1)]
        assert settled is not None and not fits[0] and mine._away(settled.plan) == fits.index(True)
        wanted.add(fits.index(True))
    assert len(wanted) == 2
    best = spill(asked).best
    assert best is not None and best.fits and best.plan.mesh == Mesh(dp_shard=2) and best.plan.global_batch == 8
    assert not best.plan.weights and "disk" not in best.plan.states.values()


def test_ranks_of_a_machine_share_its_memory() -> None:
    """What a rank has on the host is there once for every rank of a machine."""
    _, mine = shared()
    all_away = mine.plan((4, 1, "keep"), mine.most)
    needs = 2 * mine.priced(all_away).cost.worst.memory.host_bytes
    for host, enough in ((needs, True), (needs - 1, False), (needs // 2, False)):
        _, other = shared(host=host)
        found = other.priced(all_away)
        assert (found.over == "") is enough and found.host_bytes == needs
    said = helps(Spilled(best=None, nearest=found), SearchConstraints())
    assert f"--host {-(-needs // GIB)}GiB" in [flag for flag, *_ in said]


def test_a_disk_reads_and_writes_at_once_as_measured_and_else_in_turn() -> None:
    read, write = {"bytes": 100, "seconds": 2.0}, {"bytes": 100, "seconds": 3.0}
    assert offload._disk(read, write, None) == pytest.approx(20.0)
    assert offload._disk(read, write, {"bytes": 200, "seconds": 4.0}) == 25.0
    assert offload._disk(read, None, None) is None


def test_a_batch_that_ranks_cannot_share_is_said() -> None:
    with pytest.raises(UserError, match="12 samples cannot be shared by 2 devices in micro-batches of 8"):
        spill(question(on="2xH200", global_batch=12))
    with pytest.raises(UserError, match="leave out --tp") as said:
        spilled(question(on="2xH200", fixed={"tp": 2}))
    assert "bf16-master" in str(said.value)


# ---------------------------------------------------------------------- other precisions


@pytest.mark.slow(reason="another search; states move in the searches above")
def test_moments_alone_move_with_the_usual_precision() -> None:
    found = spill(question(smallest("recompute", precision=None) + 8 * MIB, precision=None))
    assert found.best is not None and found.best.plan.precision == "bf16-mixed" and found.best.plan.state_format == "fp32"
    assert found.best.plan.states


def test_the_cpu_takes_a_share_where_its_speed_is_known() -> None:
    rows = [{"name": f"adamw{how}", "elements": rate, "bytes": 1, "seconds": 1.0} for how, rate in (("", 2e8), ("-beside", 1e8))]
    before = squeezed().best
    assert before is not None and before.plan.cpu_share == 0 and before.cost.time is not None
    options = Options(profile_of=functools.cache(lambda name: slow(name, *rows)))
    found = spill(question(before.cost.worst.memory.capacity_bytes, options=options)).best
    assert found is not None and found.cost.time is not None and found.plan.states == before.plan.states
    assert 0.4 < found.plan.cpu_share < 0.7 and found.cost.time.step_seconds < 0.7 * before.cost.time.step_seconds


# ---------------------------------------------------------------------- seconds


RATES = Rates(up=10.0, down=10.0, device=1e12)


def marks(count: int, forward: float, backward: float) -> Marks:
    """A step of alike blocks, one after the other."""
    found = [Mark(0.0, "need", "")]
    for number in range(count):
        found += [Mark(number * forward, "need", str(number)), Mark(number * forward, "enter", str(number))]
    turn = count * forward
    for place, number in enumerate(reversed(range(count))):
        found += [Mark(turn + place * backward, "enter", str(number)), Mark(turn + (place + 1) * backward, "leave", str(number))]
    end = turn + count * backward
    return Marks((*found, Mark(end, "leave", "")), end)


def units(count: int, elements: int, **more: Any) -> tuple[StateUnit, ...]:
    return tuple(StateUnit(str(number), elements, "host", **more) for number in range(count))


def test_states_hide_in_the_next_forward_with_clipping_and_in_the_whole_step_without() -> None:
    step = marks(4, 1.0, 2.0)
    light, heavy = (units(4, n) for n in (5, 20))  # a second of link each, four seconds each
    for early in (False, True):
        load = OffloadBytes(states=2, weight=1, early=early)
        some, much = (played(step, many, load, RATES).seconds for many in (light, heavy))
        assert some == pytest.approx(step.end + 1.0, rel=0.01)  # the last to be left is the first that is needed
        assert much == pytest.approx(22.0 if early else 8.0 + 16.0 + 1.0, rel=0.01)  # left at 6, 8, 10 and 12, and in that order
    long = units(4, 40 * CHUNK)
    each = 4.0 / (40 * CHUNK)
    wide = Rates(up=2 / each, down=2 / each, device=1e15)
    first = played(step, long, OffloadBytes(states=2, weight=1, early=True), wide).seconds
    assert 16.0 <= first < 21.5, "of what waits, the unit that is needed first goes first"
    assert played(step, units(4, 1), OffloadBytes(states=0, weight=0), RATES).seconds == pytest.approx(step.end)


def test_weights_that_come_and_go_cost_their_link() -> None:
    step = marks(4, 1.0, 2.0)
    idle = OffloadBytes(states=0, weight=1)
    hidden = played(step, units(4, 5, weights="host"), idle, RATES).seconds  # half a second each time
    assert step.end + 1.4 <= hidden <= step.end + 2.6, "of the first block, gradients up, weights down, weights up"
    late = played(step, units(4, 40, weights="host"), idle, RATES).seconds  # four seconds each time, the last block once
    assert late >= 7 * 4.0


def test_both_engines_are_done_together_at_the_balance() -> None:
    rates = Rates(up=48e9, down=48e9, device=4e12, cpu=4.2e9, cpu_beside=2.27e9, link_beside=40e9)
    share = rates.balance(12)
    assert (1 - share) * 12 / 40e9 == pytest.approx(share / 2.27e9)
    both = rates.together(12, share)
    assert both.cpu == pytest.approx(2.27e9, rel=0.01) and both.up == pytest.approx(40e9, rel=0.01)
    step = marks(4, 0.01, 0.02)
    many = units(4, 10**9)
    seconds = {x: played(step, many, OffloadBytes(states=12, weight=2, cpu_share=x), rates).seconds for x in (0.0, share, 0.9)}
    assert seconds[share] < min(seconds[0.0], seconds[0.9])


def test_the_host_updates_as_torch_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.setitem(updates.ELEMENTS, "quick", 5000)
    monkeypatch.setattr(updates, "RUN", 2048)
    states = updates._States(5000)
    weight = torch.nn.Parameter(torch.zeros(5000))
    weight.grad = states.staged.float()
    torch.optim.AdamW([weight], lr=1e-4, fused=True).step()
    states.update()
    assert torch.equal(states.master, weight.detach()) and torch.equal(states.staged, weight.detach().bfloat16())
    (row,) = updates.updates("cpu", "quick")
    assert row["name"] == "adamw" and row["elements"] == 5000 and row["seconds"] > 0
    path = tmp_path / "H200-SXM-141GB.json"
    path.write_text(Path(foretell.__file__).parent.joinpath("hardware", "profiles", path.name).read_text())
    for _ in range(2):  # rows that are there are replaced
        updates.attach(path, (row,))
    assert [one["name"] for one in json.loads(path.read_text())["copies"]].count("adamw") == 1


# ---------------------------------------------------------------------- what is asked


def test_sizes() -> None:
    assert size_of("hbm", "24GiB") == size_of("hbm", "24") == 24 * GIB and size_of("hbm", "24GB") == 24 * 10**9
    assert size_of("host", "0.5") == GIB // 2 and size_of("disk", None) is None
    for wrong in ("", "lots", "-3", "24 apples"):
        with pytest.raises(UserError, match="--hbm"):
            size_of("hbm", wrong)


@pytest.mark.parametrize(("asked", "hardware", "said"), [
    ({"precision": MASTER}, "CPU", "GPUs"),
    ({"precision": MASTER, "tokens": 1e9, "budget": 5.0}, "H200", "--budget"),
    ({"state_format": "split"}, "H200", "bf16-master"), ({"state_format": "int3", "precision": MASTER}, "H200", "state-format"),
])  # fmt: skip
def test_what_cannot_be_asked(asked: dict[str, Any], hardware: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(SearchConstraints(**asked), parse(hardware))


def test_nothing_fits_and_the_host_is_unknown_asks_for_it() -> None:
    found = Choice(best=None)
    assert or_moved(found, question(600 * MIB, precision=None, host=None)).relaxations == ()
    (helped,) = or_moved(found, question(smallest("recompute", precision=None) + 16 * MIB, precision=None, host=None)).relaxations
    assert helped.flag.startswith("--host ") and helped.verdict in ("fits", "tight")
    with pytest.raises(UserError, match="not known"):
        or_moved(found, question(600 * MIB, precision=None, host=None, hbm=600 * MIB))
    two: Cluster = parse("H200:2")
    assert or_moved(found, replace(question(precision=None), cluster=two)) is found  # a micro-batch is the whole batch
    assert or_moved(found, replace(question(precision=None, global_batch=16, fixed={"pp": 2}), cluster=two)) is found


@pytest.mark.slow(reason="two searches through the command line; the same searches are above")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from foretell.cli import main
    from foretell.plan.file import read
    from foretell.search.solve import question as questions

    monkeypatch.setattr(questions, "Traces", lambda **how: Here(capability=how["capability"]))
    monkeypatch.chdir(tmp_path)
    best = squeezed().best
    assert best is not None
    cap = -(-best.cost.worst.memory.capacity_bytes // MIB)
    arguments = ["plan", MODEL, "--set", "layers=6", "--precision", MASTER, "--global-batch", "8", "--micro-batch", "8"]
    arguments += ["--on", "H200", "--hbm", f"{cap}MiB"]
    assert main([*arguments, "--host", "8"]) == 0
    told = capsys.readouterr().out
    assert "What is where" in told and "in host memory" in told
    plan = read(tmp_path / "plan.json")
    assert plan.states and plan.precision == MASTER and plan.hardware == f"H200,memory={cap}MiB" and plan.notes
    assert main(["show", "plan.json"]) == 0 and "host memory" in capsys.readouterr().out
    assert main(arguments) == 2 and "--host" in capsys.readouterr().err
    assert main([*arguments[:-1], "many", "--host", "8"]) == 2
    assert main([*arguments[:-1], "600GiB", "--host", "8"]) == 2
