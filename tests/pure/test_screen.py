"""The screen: never above 30 lines or the width, the verdict first, the bar in proportion, the best remedy on top."""

from __future__ import annotations

import random
import shlex
import textwrap
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len

from foretell.quantities import CATEGORIES as CATEGORY_NAMES
from foretell.quantities import (
    FITS,
    NO,
    TIGHT,
    UNKNOWN,
    Holder,
    Prediction,
)
from foretell.report import command, words
from foretell.report.terminal import bar, screen
from foretell.units import GIB, MIB
from tests.further import one_in
from tests.pure.screen_cases import (
    CLOSE,
    FAR,
    FULL,
    MFU,
    ONE,
    RUN,
    SGD,
    TIME,
    TYPED,
    WIDTHS,
    memory,
    overfull,
    prediction,
    timed,
    timed_overfull,
)


def lines(answer: Prediction, width: int = 80, **options: Any) -> list[str]:
    return screen.render(answer, width, typed=options.pop("typed", TYPED), **options).plain.split("\n")


def rows_of(shown: list[str], label: str) -> list[str]:
    """The lines of a section, without its name: up to a blank line or the next name."""
    start = next(index for index, line in enumerate(shown) if line.startswith(label))
    rows = [shown[start][11:]]
    for line in shown[start + 1 :]:
        if not line.startswith(" " * 11):
            break
        rows.append(line[11:])
    return rows


# ---------------------------------------------------------------- size


@pytest.mark.parametrize("width", one_in(4, WIDTHS, "a width between others"))
@pytest.mark.parametrize("verdict", [FITS, TIGHT, NO, UNKNOWN])
@pytest.mark.parametrize("make", [prediction, overfull, timed_overfull])
def test_never_more_than_thirty_lines_nor_wider_than_asked(make: Any, verdict: str, width: int) -> None:
    shown = lines(make(verdict), width)
    assert 10 < len(shown) <= (30 if width >= 80 else 60)
    assert not any("…" in line for line in shown), "nothing is cut off"
    assert max(map(cell_len, shown)) <= width
    assert all(line == line.rstrip() for line in shown)
    assert not any("\x1b" in line for line in shown)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("verdict", [FITS, NO])
@pytest.mark.parametrize("make", [overfull, timed_overfull])
def test_an_overfull_screen_keeps_what_matters(make: Any, verdict: str, width: int) -> None:
    shown = lines(make(verdict), width)
    text = "\n".join(shown)
    assert len(rows_of(shown, "reduce")) == 4
    assert "build_the_large_one on 8x H100-SXM-80GB:" in shown[0]
    for needed in ("allocated ", "reserved ", "device ", "largest", "assumed", "with --verbose"):
        assert needed in text
    assert any(line.startswith(("try", "next")) for line in shown[-4:])


def test_a_usual_screen_is_complete_and_has_room_between_sections() -> None:
    shown = lines(prediction(NO, capacity=50 * GIB))
    assert shown.count("") == 6
    assert len(rows_of(shown, "largest")) == 5
    assert len(rows_of(shown, "reduce")) == 3
    assert [row[:2] for row in rows_of(shown, "assumed")] == ["- ", "- "]


def test_nothing_to_say_takes_no_lines() -> None:
    base = prediction(FITS, remedies=(), assumptions=())
    shown = lines(replace(base, memory=replace(base.memory, holders=(), phases=(), bands={}, provenance={})))
    assert not any(line.startswith(("largest", "reduce", "assumed")) for line in shown)
    assert any(line.startswith("device") for line in shown)


def test_verbose_leaves_nothing_out() -> None:
    answer = overfull(FITS)
    shown = lines(answer, verbose=True)
    told = " ".join(" ".join(shown).split())
    assert all(" ".join(one.split()) in told for one in answer.assumptions) and "with --verbose" not in told
    assert len(rows_of(shown, "largest")) == len(answer.memory.holders)


# ---------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("verdict", "capacity", "line"),
    [
        (FITS, 80 * GIB, "FITS  llama3-8b on 8x H100-SXM-80GB: 62.1 of 80.0 GiB per device, 17.9 GiB spare"),
        (NO, 50 * GIB, "DOES NOT FIT  llama3-8b on 8x H100-SXM-80GB: 62.1 of 50.0 GiB per device, 12.1 GiB short"),
        (TIGHT, 63 * GIB, "TIGHT  llama3-8b on 8x H100-SXM-80GB: 62.1 of 63.0 GiB per device, 0.87 GiB spare; may need up to 64.1 GiB"),
        (UNKNOWN, 80 * GIB, "CANNOT TELL  llama3-8b on 8x H100-SXM-80GB: 62.1 of 80.0 GiB per device, 17.9 GiB spare"),
    ],
)  # fmt: skip
def test_the_verdict_is_the_first_line(verdict: str, capacity: int, line: str) -> None:
    answer = prediction(verdict, capacity=capacity)
    assert lines(answer, 120)[0] == line
    first, second = lines(answer, 76)[:2]
    assert f"{first} {second.strip()}" == line


def test_one_device_is_not_spoken_of_as_several() -> None:
    answer = prediction(FITS, hardware={"nodes": 1, "devices_per_node": 1, "device": {"name": "H100-SXM-80GB"}})
    assert lines(answer)[0] == "FITS  llama3-8b on H100-SXM-80GB: 62.1 of 80.0 GiB, 17.9 GiB spare"
    answer = prediction(FITS, hardware={"nodes": 2, "devices_per_node": 8, "device": {"name": "A100"}})
    assert lines(answer)[0].startswith("FITS  llama3-8b on 2x8x A100: ")


def test_no_that_rests_on_the_band_says_so() -> None:
    assert "0.87 GiB spare, but may need 64.1 GiB" in lines(prediction(NO, capacity=63 * GIB), 120)[0]


def test_the_second_line_says_what_was_asked() -> None:
    told = lines(prediction(FITS), 120)[1].strip()
    assert told == "8.03B parameters; micro-batch 1 × 8192 tokens; adamw-fused, bf16-mixed, recompute none"


# ---------------------------------------------------------------- the bar


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("capacity", [80 * GIB, 40 * GIB])
def test_the_bar_fills_the_width_in_proportion(width: int, capacity: int) -> None:
    answer = prediction(FITS if capacity > 62 * GIB else NO, capacity=capacity)
    row = next(line for line in lines(answer, width) if line.startswith("█"))
    assert len(row) == width
    whole = max(capacity, answer.memory.device_bytes)
    for part in bar.parts(answer.memory):
        assert abs(row.count(part.mark) - part.bytes * width / whole) < 1
    order = list(dict.fromkeys(row))
    assert order == [part.mark for part in bar.parts(answer.memory) if part.mark in row]


def test_cells_sum_to_the_width_whatever_the_amounts() -> None:
    chance = random.Random(0)
    for _ in range(500):
        amounts = [chance.choice((0, 1, chance.randrange(10**11))) for _ in range(chance.randrange(1, 12))]
        width = chance.randrange(1, 200)
        counts = bar.cells(amounts, width)
        total = sum(amounts)
        assert sum(counts) == (width if total else 0)
        assert all(abs(count - amount * width / total) < 1 for count, amount in zip(counts, amounts, strict=True) if total)


def test_parts_account_for_every_byte_of_the_device() -> None:
    found = prediction(FITS).memory
    assert sum(part.bytes for part in bar.parts(found)) == found.capacity_bytes
    stray = replace(found, categories={"parameters": GIB, "a new category": 5 * GIB})
    by_name = {part.name: part.bytes for part in bar.parts(stray)}
    assert by_name["other"] == found.allocated_bytes - GIB, "bytes of no known category are shown as other"


def test_every_part_has_a_mark_of_its_own() -> None:
    assert set(CATEGORY_NAMES) < set(bar._LOOKS), "a category without a mark would be shown as other"
    looks = (*bar._LOOKS.values(), *bar._TIME_LOOKS.values())
    marks, letters = [look[0] for look in looks], [look[1] for look in looks]
    assert len(set(marks)) == len(marks) and len(set(letters)) == len(letters)
    assert all(cell_len(mark) == 1 for mark in marks + letters)


def test_the_legend_names_every_part_with_its_size() -> None:
    shown = "\n".join(lines(prediction(FITS), 80))
    for entry in ("█ parameters 8.00", "▒ optimizer 16.0", "▥ workspace 0.12", "▦ inputs <0.01", "░ unused 3.00",
                  "▨ context 1.00", "· spare 17.9 GiB"):  # fmt: skip
        assert entry in shown


def test_small_models_are_told_in_smaller_units() -> None:
    small = memory({"parameters": 3 * MIB, "activations": 5 * MIB}, unused=2 * MIB, context=90 * MIB, capacity=64 * GIB)
    shown = lines(prediction(FITS, memory=replace(small, bands={})), 120)
    assert "100.0 MiB of 64.0 GiB" in shown[0]
    assert any("█ parameters 3.00" in line for line in shown)
    assert any(line.startswith("allocated  ") and "8.0 MiB" in line for line in shown)


@pytest.mark.parametrize("capacity", [2 * GIB, 31 * GIB, 62 * GIB])
def test_a_mark_shows_where_the_memory_ends(capacity: int) -> None:
    answer = prediction(NO, capacity=capacity)
    mark = next(line for line in lines(answer, 80) if "▲" in line)
    assert mark.index("▲") == capacity * 80 // answer.memory.device_bytes
    assert screen._size(capacity) in mark
    assert not any("▲" in line for line in lines(prediction(FITS)))


def test_ascii_only_is_ascii_and_of_the_same_shape() -> None:
    for answer in (prediction(NO, capacity=50 * GIB), timed(prediction(FITS, remedies=(), assumptions=()), run=RUN)):
        fancy, simple = lines(answer), lines(answer, ascii_only=True)
        assert all(line.isascii() for line in simple)
        assert list(map(len, simple)) == list(map(len, fancy))


# ---------------------------------------------------------------- numbers


def test_three_numbers_with_band_and_provenance() -> None:
    shown = lines(prediction(FITS), 120)
    assert [" ".join(line.split()) for line in shown if line.startswith(("allocated", "reserved"))] == [
        "allocated 58.1 GiB 57.6 – 58.6 GiB counted",
        "reserved 61.1 GiB 60.6 – 62.1 GiB counted",
    ]
    assert next(line for line in shown if line.startswith("device")).endswith("measured; highest in first_step")


def test_holders_keep_their_order_and_the_end_of_long_paths() -> None:
    base = prediction(FITS)
    held = (Holder(name="model." * 30 + "mlp.down", category="activations", bytes=GIB), *base.memory.holders)
    rows = rows_of(lines(replace(base, memory=replace(base.memory, holders=held))), "largest")
    assert rows[0].endswith("  *.model.model.model.model.model.model.mlp.down"), "whole parts, as many as fit"
    assert [row.rpartition(".")[2] for row in rows[1:]] == ["part0", "part1", "part2", "part3"]


def test_assumptions_shown_and_left_add_up() -> None:
    for count in range(1, 12):
        answer = prediction(FITS, assumptions=tuple(f"assumption number {index}" for index in range(count)))
        rows = rows_of(lines(answer), "assumed")
        assert len(rows) <= 5
        left = int(rows[-1].split()[0]) if rows[-1].endswith("with --verbose") else 0
        assert len([row for row in rows if row.startswith("- ")]) + left == count


# ---------------------------------------------------------------- time and money


def test_a_whole_screen_with_time() -> None:
    expected = """\
        FITS  llama3-8b on H200-SXM-141GB: 62.1 of 80.0 GiB, 17.9 GiB spare
          8.03B parameters; micro-batch 1 × 8192 tokens; adamw-fused, bf16-mixed,
          recompute none

        ████████▓▓▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▚▤▤▤▤▞▞░░░▨··················
        █ parameters 8.00  ▓ gradients 8.00  ▒ optimizer 16.0  ▚ activations 20.0
        ▤ logits 4.00  ▞ temporaries 2.00  ▥ workspace 0.12  ▦ inputs <0.01
        ░ unused 3.00  ▨ context 1.00  · spare 17.9 GiB

        allocated  58.1 GiB  57.6 – 58.6 GiB  counted
        reserved   61.1 GiB  60.6 – 62.1 GiB  counted
        device     62.1 GiB  61.1 – 64.1 GiB  measured; highest in first_step

        step       142 ms (131–155)  57,700 tokens/s  MFU 52 %  bound by compute
        time       gemm 61 %  attention 12 %  memory 24 %  communication 1 %  host 2 %
        cost       $4.10/h  $0.16 per 1K steps  $19.74 per 1B tokens  87.0 J/step ±10 %
        run        1T tokens  201 days (185–219)  $19,700  2.94 MWh  1.30 t CO2
        confidence time measured on H200-SXM-141GB ±8 %  energy measured  price assumed

        largest    9.00 GiB  activations  blocks.*.part0
                   8.00 GiB  activations  blocks.*.part1

        assumed    - H100 means H100-SXM-80GB
                   - eager PyTorch

        reduce     fits            −15.0 GiB  --optimizer sgd   plain SGD
                   fits            −20.0 GiB  --recompute full  recompute every block
                   8.00 GiB short  −4.00 GiB  --micro-batch 2   two samples at a time

        next       foretell fit llama3-8b --on 8xH100 --json"""
    shown = lines(timed(prediction(FITS, hardware=ONE), run=RUN))
    assert shown == textwrap.dedent(expected).split("\n")


def test_with_room_to_spare_time_has_a_bar_in_proportion() -> None:
    shown = lines(timed(prediction(FITS, remedies=(), assumptions=()), run=RUN), 80)
    row, *legend = rows_of(shown, "time")
    assert len(row) == 69
    for mark, seconds in zip("■◆□▸○", TIME.breakdown.values(), strict=True):
        assert abs(row.count(mark) - 69 * seconds / TIME.step_seconds) < 1
    assert legend == ["■ gemm 61 %  ◆ attention 12 %  □ memory 24 %  ▸ communication 1 %", "○ host 2 %"]


def test_time_parts_account_for_every_second() -> None:
    odd = replace(TIME, breakdown={"new kind": 0.1, "newer": 0.02, "gemm": 0.02, "recurrent": 0.0})
    assert [(part.name, round(part.seconds, 6)) for part in bar.time_parts(odd)] == [("gemm", 0.02), ("other", 0.12)]
    answer = timed(prediction(FITS), time=replace(TIME, breakdown={"gemm": 1.0, "attention": 1.0, "memory": 1.0}))
    row = rows_of(lines(answer), "time")[0]
    assert sum(int(word) for word in row.split() if word.isdecimal()) == 100, "rounded shares add up"


def test_several_devices_are_told_together_and_each_where_there_is_room() -> None:
    answer = timed(prediction(FITS), run=RUN)
    assert rows_of(lines(answer, 80), "step") == ["142 ms (131–155)  462,000 tokens/s  MFU 52 %  bound by compute"]
    assert "462,000 tokens/s (57,700 each)  MFU" in rows_of(lines(answer, 120), "step")[0]
    assert "0.549 device-years" in " ".join(rows_of(lines(answer, 120), "run"))
    assert not any("device-years" in line for line in lines(timed(prediction(FITS, hardware=ONE), run=RUN)))


def test_what_does_not_fit_has_no_cost_and_says_so() -> None:
    shown = lines(timed(prediction(NO, capacity=50 * GIB)), 100)
    assert rows_of(shown, "step") == ["142 ms (131–155)  462,000 tokens/s (57,700 each)  MFU 52 %  if it fit"]
    assert not any(line.startswith(("cost", "time", "run")) for line in shown)


def test_recomputation_shows_in_hfu_alone() -> None:
    assert "(HFU" not in "\n".join(lines(timed(prediction(FITS))))
    assert "MFU 39 % (HFU 52 %)" in "\n".join(lines(timed(prediction(FITS), mfu=replace(MFU, value=0.39)), 120))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("provenance", ["measured", "assumed: rates of the catalogue, efficiency carried over from H200"])
def test_how_the_time_is_known_is_always_told(provenance: str, width: int) -> None:
    answer = timed(prediction(FITS), time=replace(TIME, provenance=provenance))
    text = " ".join("\n".join(line for line in lines(answer, width) if not line.startswith(("device", "assumed"))).split())
    assert provenance.partition(":")[0] in text.partition("step 142 ms")[2]


@pytest.mark.parametrize("width", one_in(3, WIDTHS, "a width between others"))
def test_the_step_and_its_rate_are_never_cut(width: int) -> None:
    for answer in (timed(prediction(FITS), run=RUN), timed_overfull(FITS), timed_overfull(NO)):
        text = "\n".join(lines(answer, width))
        for needed in ("142 ms (131–155)", "462,000 tokens/s", "1T tokens", "201 days (185–219)", "$19,700"):
            assert needed in text


def test_only_what_is_known_is_told() -> None:
    base = timed(prediction(FITS))
    bare = lines(replace(base, throughput=None, mfu=None, energy=None, cost=None))
    assert rows_of(bare, "step") == ["142 ms (131–155)  bound by compute"]
    assert not any(line.startswith(("cost", "energy", "run")) for line in bare)
    assert rows_of(bare, "confidence") == ["time measured on H100-SXM-80GB ±8 %"]
    assert rows_of(lines(replace(base, cost=None)), "energy") == ["696 J/step ±10 %"]
    unknown = lines(prediction(FITS))
    assert not any(line.startswith(("step", "time", "cost", "confidence")) for line in unknown)


@pytest.mark.parametrize(
    ("source", "told"),
    [("assumed: a cloud, of one day", "price assumed"), ("your price, from /home/me/prices.toml", "your price"),
     ("given with the hardware", "price given with the hardware"), ("", "energy measured")],
)  # fmt: skip
def test_where_the_price_comes_from(source: str, told: str) -> None:
    base = timed(prediction(FITS))
    assert base.cost is not None
    assert rows_of(lines(replace(base, cost=replace(base.cost, source=source)), 120), "confidence")[0].endswith(f"  {told}")


def test_what_binds_is_named_in_words() -> None:
    words = {"host": "CPU-bound (launch overhead)", "network": "bound by the network", "memory bandwidth": "bound by memory bandwidth"}
    for binds, told in words.items():
        shown = "\n".join(lines(timed(prediction(FITS), time=replace(TIME, binds=binds)), 120))
        assert f"{told}\n" in shown


def test_a_step_that_waits_for_the_host_is_offered_compilation_once() -> None:
    waiting = timed(prediction(FITS, capacity=140 * GIB), time=replace(TIME, binds="host"))
    assert rows_of(lines(waiting), "next") == ["foretell fit llama3-8b --on 8xH100 --compile"]
    recipe = {**waiting.model["recipe"], "compile": True}
    compiled = replace(waiting, model={**waiting.model, "recipe": recipe})
    shown = lines(compiled, 120, typed=(*TYPED, "--compile"))
    assert shown[1].endswith("recompute none, torch.compile")
    assert rows_of(shown, "next") == ["foretell fit llama3-8b --on 8xH100 --compile --micro-batch 2"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.142, "142 ms"), (0.00142, "1.42 ms"), (0.0142, "14.2 ms"), (3.5e-5, "35.0 µs"), (1.42, "1.42 s"), (0.99999, "1.00 s"),
     (5e-8, "0.05 µs"), (1234.0, "1,230 s"), (0.0, "0 µs")],
)  # fmt: skip
def test_seconds_in_words(value: float, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(90.0, "90.0 s (45.0–180)"), (7200.0, "2.00 hours (1.00–4.00)"), (86400.0 * 2, "2.00 days (1.00–4.00)"),
     (365.25 * 86400 * 3, "3.00 years (1.50–6.00)"), (7199.0, "120 minutes (60.0–240)")],
)  # fmt: skip
def test_runs_in_words(seconds: float, text: str) -> None:
    assert words.run_span(seconds, seconds / 2, 2 * seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.1, "$4.10"), (0.1617, "$0.16"), (0.0016172, "$0.0016"), (1.6e-7, "$1.6e-07"), (99.999, "$100.00"), (612.4, "$612"),
     (19741.0, "$19,700"), (0.0, "$0.00")],
)  # fmt: skip
def test_money_in_words(value: float, text: str) -> None:
    assert words.money(value) == text
    assert words.money(value, "XAF") == text.replace("$", "XAF ")


def test_money_of_steps_is_at_least_a_cent_where_a_million_are_enough() -> None:
    assert words.per_steps(2.5) == "$2.50 per step"
    assert words.per_steps(0.01) == "$0.01 per step"
    assert words.per_steps(0.00016) == "$0.16 per 1K steps"
    assert words.per_steps(2e-8) == "$0.02 per 1M steps"


def test_energy_and_mass_in_words() -> None:
    assert [words.joules(value) for value in (0.5, 87.0, 1234.0, 5e9)] == ["0.5 J", "87.0 J", "1.23 kJ", "5.00 GJ"]
    assert [words.kilowatt_hours(value * 3.6e6) for value in (0.25, 999.0, 2940.0, 3.1e6)] == [
        "0.25 kWh", "999 kWh", "2.94 MWh", "3.10 GWh",
    ]  # fmt: skip
    assert [words.mass(value) for value in (0.012, 12.0, 1300.0)] == ["12.0 g", "12.0 kg", "1.30 t"]
    assert [words.percent(value) for value in (0.0, 0.042, 0.521, 1.0)] == ["0 %", "4.2 %", "52 %", "100 %"]


# ---------------------------------------------------------------- remedies and the next command


def test_each_remedy_is_shown_with_what_was_predicted_of_it() -> None:
    answer = prediction(NO, capacity=50 * GIB, remedies=(SGD, FULL, CLOSE, FAR))
    rows = rows_of(lines(answer), "reduce")
    assert [" ".join(row.split()[:6]) for row in rows] == [
        "fits −15.0 GiB --optimizer sgd plain", "fits −20.0 GiB --recompute full",
        "8.00 GiB short −4.00 GiB --micro-batch", "10.0 GiB short −2.00 GiB --recompute",
    ]  # fmt: skip
    assert rows_of(lines(answer), "try") == ["foretell fit llama3-8b --on 8xH100 --optimizer sgd", "predicted: fits, 47.0 of 50.0 GiB"]
    assert len(rows_of(lines(prediction(NO, capacity=50 * GIB, remedies=(FULL, *[FAR] * 5))), "reduce")) == 4


def test_a_command_is_only_offered_with_a_verdict_that_helps() -> None:
    """None was predicted to fit, or none to leave more room where it is tight: no command is offered to be tried."""
    tight = replace(SGD, verdict=TIGHT)
    for verdict, remedies in ((NO, (CLOSE, FAR)), (TIGHT, (tight, CLOSE)), (NO, (replace(SGD, verdict=UNKNOWN, fits=False),))):
        shown = lines(prediction(verdict, capacity=57 * GIB, remedies=remedies, advice="nothing tried here fits: 2 ways tried"), 120)
        assert not any(line.startswith("try") for line in shown)
        assert rows_of(shown, "next") == ["foretell fit llama3-8b --on 8xH100 --json", "nothing tried here fits: 2 ways tried"]
    assert rows_of(lines(prediction(NO, capacity=50 * GIB, remedies=(tight,))), "try")[1].startswith("predicted: tight")


def test_a_plan_is_offered_as_its_own_command_and_more_devices_are_counted() -> None:
    moved = replace(SGD, flag="", command="foretell plan llama3-8b --on 8xH100 --host 90GiB", devices=8)
    rows = rows_of(lines(prediction(NO, capacity=50 * GIB, remedies=(moved,)), 120), "try")
    assert rows == [moved.command, "predicted: fits, 47.0 of 50.0 GiB each"]
    more = replace(SGD, flag="--on 16xH100", devices=16, same_maths=False)
    rows = rows_of(lines(prediction(NO, capacity=50 * GIB, remedies=(more,)), 120), "try")
    assert rows == ["foretell fit llama3-8b --on 16xH100", "predicted: fits, 47.0 of 50.0 GiB each; on 16 devices; not the same maths"]


@pytest.mark.parametrize(
    ("typed", "flag", "result"),
    [
        ("fit m --on H100", "--recompute full", "fit m --on H100 --recompute full"),
        ("fit m --recompute none --on H100", "--recompute full", "fit m --on H100 --recompute full"),
        ("fit m --recompute=none --on H100", "--recompute full", "fit m --on H100 --recompute full"),
        ("fit --nf4 m --on H100 --lora 8", "--lora 16 --nf4", "fit m --on H100 --lora 16 --nf4"),
        ("fit m --on H100", "--on 8xH100", "fit m --on 8xH100"),
        ("fit m --on H100 --set a=1", "--set b=2", "fit m --on H100 --set a=1 --set b=2"),
        ("fit m --on H100 --recompute-x 3", "--recompute full", "fit m --on H100 --recompute-x 3 --recompute full"),
        ("fit m --on H100", "--infer", "fit m --on H100 --infer"),
    ],
)
def test_a_flag_replaces_what_stood_there(typed: str, flag: str, result: str) -> None:
    assert command.with_flag(typed.split(), flag) == result.split()


def test_the_next_command_when_it_fits() -> None:
    assert rows_of(lines(prediction(FITS)), "next") == ["foretell fit llama3-8b --on 8xH100 --json"]
    roomy = prediction(FITS, capacity=140 * GIB)
    assert rows_of(lines(roomy), "next")[0].endswith("--micro-batch 2")
    typed = (*TYPED, "--micro-batch", "4")
    assert rows_of(lines(roomy, typed=typed), "next")[0] == "foretell fit llama3-8b --on 8xH100 --micro-batch 8"
    assert "--micro-batch" not in rows_of(lines(roomy, typed=()), "next")[0], "nobody said how large it is now"


def test_a_long_command_can_be_copied() -> None:
    typed = ["fit", "folder with space/model.py:build", "--on", "2x8xH100-SXM-80GB", "--set", "name=a b", "--seq", "4096"]
    rows = rows_of(lines(prediction(NO, capacity=50 * GIB), 60, typed=typed), "try")
    assert len(rows) > 1
    assert rows[-1] == "predicted: fits, 47.0 of 50.0 GiB"
    assert shlex.split("\n".join(rows[:-1]).replace("\\\n", "")) == ["foretell", *typed, "--optimizer", "sgd"]


def test_without_a_command_line_the_plainest_command_is_offered() -> None:
    rows = rows_of(lines(prediction(NO, capacity=50 * GIB), 120, typed=()), "try")
    assert rows[0] == "foretell fit llama3-8b --on 8xH100-SXM-80GB --optimizer sgd"
    base = prediction(FITS, capacity=140 * GIB)
    sized = replace(base, model={**base.model, "micro_batch": 3, "seq": 64, "image": None})
    rows = rows_of(lines(sized, 120, typed=()), "next")
    assert rows == ["foretell fit llama3-8b --on 8xH100-SXM-80GB --seq 64 --micro-batch 6"]
