"""docs/questions.md: every screen is one screen, and every answer is right by something other than the line that says it."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foretell.hardware import find
from foretell.hardware.prices import carbon_g_per_kwh, price_per_hour, pue
from foretell.units import GIB
from tests.kept_traces import with_traces
from tests.pure import test_docs as docs

PAGE = "docs/questions.md"
LINES = 30
WIDTH = 100
Numbers = dict[str, dict[str, str]]


EXAMPLES = {
    one.command.removeprefix("foretell "): one
    for block in docs.blocks(PAGE, docs.TEXTS[PAGE]) if block.language in docs.SHOWN and not block.mark for one in docs.examples(block)
}  # fmt: skip
LONG = (
    "fit llama3-8b --on RTX4090", "fit resnet50 --on T4", "fit gpt2 --on T4", "plan llama3-70b", "plan gpt2 ", "plan advise gpt2",
)  # fmt: skip
"""How commands begin that search, or trace step after step."""
SEARCHED = pytest.mark.slow(reason="many steps are traced or plans costed; screens of one prediction, and searches of smaller models, are looked at")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[str]]]:
    """What a command of the page prints, compared with the page. One cache serves all, and the questions of the tests below."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("questions")
        for name, value in docs.wanted(with_traces(folder / "cache")).items():
            patch.setenv(name, value)
        (folder / "here").mkdir()
        patch.chdir(folder / "here")
        patch.syspath_prepend(folder / "here")
        for block in docs.blocks(PAGE, docs.TEXTS[PAGE]):
            if block.mark == "file":
                sys.modules.pop(Path(block.said).stem, None)  # another page's, if it has one
                Path(block.said).write_text("\n".join(block.lines) + "\n")

        @functools.cache
        def play(command: str) -> list[str]:
            one = EXAMPLES[command]
            output = docs.printed(one.command)
            shown = "\n".join(docs._trimmed(one.output))
            assert docs.matches(output, one.output), f"{PAGE}:{one.start}: `make docs` would mend it\n--- shown\n{shown}\n" + "\n".join(output)
            return output

        yield play


@pytest.fixture
def screen(asked: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """The screen of the one command that begins with these words."""

    def of(start: str) -> list[str]:
        (found,) = [command for command in EXAMPLES if command.startswith(start)]
        return asked(found)

    return of


def again(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Another question, in the folder and with the cache of the page."""
    from foretell.cli import main

    capsys.readouterr()
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def table(lines: list[str]) -> Numbers:
    """A table of several kinds of hardware: row → column → text. Columns are told apart by where they end."""
    head = lines[1]
    ends = {match[0]: match.end() for match in re.finditer(r"\S+(?: \S+)*", head) if match[0] != "on"}
    rows: Numbers = {}
    for line in lines[2:]:
        name, verdict = re.split(r"  +", line)[:2]
        cells = {"verdict": verdict}
        before = 0
        for column, end in ends.items():
            cells[column] = line[before:end].split("  ")[-1].strip()
            before = end
        rows[name] = cells
    return rows


def number(text: str) -> float:
    match = re.search(r"[\d,]*\.?\d+", text)
    assert match is not None, text
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[match.end() : match.end() + 1], 1.0)
    return float(match[0].replace(",", "")) * scale


def hours(text: str) -> float:
    return number(text) * {"d": 24.0, "h": 1.0, "min": 1 / 60}[text.split()[-1]]


def near(value: float, other: float, digits: float = 0.006) -> bool:
    """Equal as far as three printed digits say."""
    return math.isclose(value, other, rel_tol=digits)


# ---------------------------------------------------------------- all of them


def test_there_are_twenty_and_most_have_a_bar() -> None:
    assert len(EXAMPLES) == 20
    questions = re.findall(r"^\*\*[^*]+\?\*\*", Path(docs.ROOT / PAGE).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(questions) == 20
    assert sum(bar("\n".join(one.output)) is not None for one in EXAMPLES.values()) >= 11, "and this machine's, whose bytes the page leaves out"


@pytest.mark.parametrize("command", [pytest.param(one, marks=SEARCHED if one.startswith(LONG) else ()) for one in EXAMPLES])
def test_each_is_one_screen_whose_parts_add_up(command: str, asked: Callable[[str], list[str]]) -> None:
    """The legend of the bar is the device: what is used, and what is left of it."""
    output = asked(command)
    assert 3 < len(output) <= LINES, f"{len(output)} lines"
    assert max(map(len, output)) <= WIDTH
    assert not any("…" in line for line in output if " … " not in line), "something is cut off"
    text = "\n".join(output)
    head = bar(text)
    if head is None:
        return
    scale = 1024 if re.search(r"· spare [\d.,]+ MiB", text) else 1
    legend = re.findall(r"[█▓▒▚▤▞▥▦▛▩░▨·] [a-z]+ (<?)([\d.,]+)", text)
    total = sum(0.0 if less else float(value.replace(",", "")) for less, value in legend) / scale
    used, capacity, spare = (float(part) for part in head.groups())
    assert abs(total - capacity) < 0.1 and abs(used + spare - capacity) < 0.11
    shares = re.search(r"^time +(.*%)$", text, flags=re.MULTILINE)
    assert shares is None or sum(map(int, re.findall(r"(\d+) %", shares[1]))) == 100


def bar(text: str) -> re.Match[str] | None:
    """Used, capacity and spare, where a screen has a bar of all."""
    head = re.search(r"([\d.]+) of ([\d.]+) GiB(?: per device)?, ([\d.]+) GiB spare", text)
    return head if "· spare" in text else None


# ---------------------------------------------------------------- does it fit


@pytest.mark.slow(reason="a screen that is slow above; what a file and a script hold is counted below")
def test_an_8b_model_needs_sixteen_bytes_a_parameter(screen: Callable[[str], list[str]]) -> None:
    """Weights, gradients and two states in fp32: 16 bytes, divided by the devices, are a floor that one 4090 is below."""
    rows = table(screen("fit llama3-8b --on RTX4090,"))
    for name, count in (("RTX4090", 1), ("RTX4090:16", 16)):
        used, capacity = (float(part) for part in rows[name]["memory"].removesuffix(" GiB").split(" of "))
        assert used >= 12 * 8.03e9 / count / GIB and (rows[name]["verdict"] == "does not fit") == (used > capacity)
    assert rows["RTX4090"]["verdict"] == "does not fit"


@pytest.mark.slow(reason="a screen that is slow above; test_capture.py has packed weights and adapters")
def test_lora_on_a_4_bit_base_counts_weights_by_their_bits(screen: Callable[[str], list[str]]) -> None:
    text = "\n".join(screen("fit llama3-8b --on RTX4090 --lora"))
    assert text.startswith("FITS") and "8.03B parameters and 41.9M in adapters" in text
    vocabulary, width, kv, inner, layers, rank = 128256, 4096, 1024, 14336, 32, 16
    linear = layers * (2 * width * width + 2 * width * kv + 3 * width * inner)
    other = 2 * vocabulary * width + (2 * layers + 1) * width
    adapters = layers * rank * (2 * 2 * width + 2 * (width + kv) + 3 * (width + inner))
    assert linear + other == 8_030_261_248 and adapters == 41_943_040, "Llama 3's published shapes"
    held = linear * (0.5 + 4 / 64) + 4 * other + 4 * adapters
    found = re.search(r"█ parameters ([\d.]+)", text)
    assert found is not None and abs(float(found[1]) - held / GIB) < 0.01
    states = re.search(r"▒ optimizer ([\d.]+)", text)
    assert states is not None and abs(float(states[1]) - 8 * adapters / GIB) < 0.01


@pytest.mark.slow(reason="a screen that is slow above; test_most.py finds the largest batch too")
@pytest.mark.parametrize(("start", "option"), [("fit resnet50 --on T4", "--micro-batch"), ("fit gpt2 --on T4", "--seq")])
def test_the_largest_fits_and_one_more_does_not(
    start: str, option: str, screen: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(rf"largest    {option} (\d+);", "\n".join(screen(start)))
    assert found is not None
    size, words = int(found[1]), start.split() + (["--micro-batch", "64"] if option == "--seq" else [])
    assert again(capsys, *words, option, str(size))[1]["verdict"] == "fits"
    assert again(capsys, *words, option, str(size + 1))[1]["verdict"] in ("tight", "no")


def fewest_for_70b(shown: list[str]) -> int:
    found = re.search(r", (\d+) of its (\d+) devices, ", shown[0])
    assert found is not None
    return int(found[1])


@pytest.mark.slow(reason="a screen that is slow above; what a file and a script hold is counted below")
def test_the_fewest_hold_sixteen_bytes_a_parameter_and_half_of_them_do_not(screen: Callable[[str], list[str]]) -> None:
    least = 16 * 70.55e9 / find("H100").memory_bytes  # weights, gradients and two states in fp32
    assert least / 2 < fewest_for_70b(screen("plan llama3-70b")) / 2 < least


@pytest.mark.slow(reason="the floor above says it of half of them")
def test_one_less_than_the_fewest_does_not_fit(screen: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    fewest = fewest_for_70b(screen("plan llama3-70b"))
    status, answer = again(capsys, "plan", "llama3-70b", "--on", f"H100:{fewest - 1}", "--objective", "smallest", "--quick")
    assert status == 1 and answer["plan"] is None and answer["bytes_short"] > 0


def test_a_models_file_and_a_script_hold_what_their_shapes_say(screen: Callable[[str], list[str]]) -> None:
    own, script = "\n".join(screen("fit mine.py")), "\n".join(screen("fit --on H100 -- python"))
    width = 2048
    assert f"{(8 * width * width + 5 * width) / 1e6:.1f}M parameters" in own
    assert "micro-batch 64, width=2048;" in own and "tokens" not in own, "an MLP has samples"
    weights = (1024 * 4096 + 4096 + 4096 * 10 + 10) * 4 / 2**20
    assert f"█ parameters {weights:.1f}" in script and f"▒ optimizer {2 * weights:.1f}" in script.replace("32.3", f"{2 * weights:.1f}")


def test_this_machine_and_a_mac_say_what_they_assume(screen: Callable[[str], list[str]]) -> None:
    assert screen("fit gpt-10m --on auto")[0].startswith("FITS  gpt-10m on ")
    mac = "\n".join(screen("fit resnet50 --on M3-Max"))
    chip = find("M3-Max")
    assert f"of {chip.memory_bytes / GIB:.1f} GiB" in mac and "time assumed" in mac
    rate = re.search(r"([\d.]+) samples/s  MFU (\d+) %", mac)
    assert rate is not None
    flops = 3 * 2 * 4.09e9 * float(rate[1])  # ResNet-50: 4.09 billion multiply-adds an image, published
    assert abs(flops / chip.peak("bfloat16") - int(rate[2]) / 100) < 0.015


def test_a_configuration_is_the_options_that_it_says(screen: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    typed = again(capsys, "fit", "gpt2", "--on", "8xA100", "--micro-batch", "8", "--clip", "1.0", "--precision", "bf16-mixed")[1]
    assert f"{typed['memory']['device_bytes'] / GIB:.2f} of" in screen("fit gpt2 --on 8xA100 --from")[0]


# ---------------------------------------------------------------- how long, how much


@pytest.mark.parametrize(
    ("start", "amount"), [("fit gpt2 --on A100,8xA100,H100", 10e9), ("fit vit-b16", 90 * 1.28e6)],
)  # fmt: skip
def test_hours_are_amount_by_rate_and_dollars_hours_by_price(start: str, amount: float, screen: Callable[[str], list[str]]) -> None:
    rows = table(screen(start))
    unit = next(column for column in next(iter(rows.values())) if column.endswith("/s"))
    for name, row in rows.items():
        count, device = (8, name[2:]) if name.startswith("8x") else (1, name)
        price, _ = price_per_hour(find(device))
        assert price is not None
        taken = amount / number(row[unit]) / 3600
        assert near(taken, hours(row["run"]), 0.01), f"{name}: two figures of three digits"
        assert abs(taken * count * price - number(row["money"])) < 0.6 + 0.01 * taken * count * price, name
        watts = number(row["energy"]) * 1e3 / hours(row["run"]) / count
        assert 0.1 * find(device).tdp_watts < watts <= 1.02 * find(device).tdp_watts, "no more than the board may draw"  # type: ignore[operator]


def test_rows_are_in_order_and_their_costs_follow_from_price_and_rate(screen: Callable[[str], list[str]]) -> None:
    rows = table(screen("fit gpt2-medium"))
    costs = [number(row["$ per 1B tokens"]) for row in rows.values()]
    assert costs == sorted(costs)
    for name, row in rows.items():
        count, device = (2, name[2:]) if name.startswith("2x") else (1, name)
        price, _ = price_per_hour(find(device))
        assert price is not None
        assert near(count * price / 3600 / number(row["tokens/s"]) * 1e9, number(row["$ per 1B tokens"]), 0.01)
    money = [number(row["money"]) for row in table(screen("fit vit-b16")).values()]
    assert money == sorted(money)


def test_carbon_is_energy_by_the_grid(screen: Callable[[str], list[str]]) -> None:
    line = next(line for line in screen("fit gpt2 --on H100") if line.startswith("run"))
    found = re.search(r"([\d.]+) hours \(.*\)  \$([\d.]+)  ([\d.]+) kWh  ([\d.]+) g CO2", line)
    assert found is not None
    taken, money, energy, carbon = map(float, found.groups())
    assert near(energy * carbon_g_per_kwh("FR")[0] * pue()[0], carbon)
    assert near(taken * 3.99, money)
    assert number(table(screen("fit gpt2 --on A100,8xA100"))["H100"]["energy"]) == energy, "two screens, one figure"


@pytest.mark.slow(reason="a screen that is slow above; hours of a run are compared above")
def test_the_deadline_is_kept_and_not_with_fewer(screen: Callable[[str], list[str]]) -> None:
    shown = screen("plan gpt2 ")
    devices = re.search(r", (\d+) of its 8 devices", shown[0])
    run = re.search(r"run     10B tokens, 153K steps, ([\d.]+) hours \([\d.–]+\), \$([\d.]+), ([\d.]+) kWh", "\n".join(shown))
    assert devices is not None and run is not None
    count, taken, money = int(devices[1]), float(run[1]), float(run[2])
    assert taken < 12 and near(money, taken * count * 2.79)
    rate = re.search(r"([\d,]+) tokens/s; bound", "\n".join(shown))
    assert rate is not None and near(10e9 / number(rate[1]) / 3600, taken)
    fewer = [devices for devices in range(1, count) if 64 % devices == 0]
    assert fewer and all(10e9 / (number(rate[1]) / count * devices) / 3600 > 12 for devices in fewer), "as fast each as the fastest"


# ---------------------------------------------------------------- faster, serving


@pytest.mark.slow(reason="a screen that is slow above; test_remedies.py asks printed commands again")
def test_advice_is_what_fit_says_of_the_change(screen: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    shown = screen("plan advise gpt2")
    eager = number(table(screen("fit gpt2 --on A100,8xA100"))["A100"]["step"])
    compiled = next(line for line in screen("fit gpt2 --on A100 --micro-batch 8 --compile") if line.startswith("step"))
    told = next(line for line in shown if "torch.compile [bounded]" in line)
    assert near(eager / number(compiled), number(told), 0.01)
    command = next(line.split()[1:] for line in shown if line.startswith("  foretell fit"))
    together = again(capsys, *command)[1]
    faster = together["throughput"]["per_second"] / (8 * 1024 / (eager / 1e3))
    assert near(faster, number(shown[shown.index("together") + 1]), 0.01)


def test_accumulating_keeps_a_gradient_for_every_weight(screen: Callable[[str], list[str]]) -> None:
    once, often = (dict(re.findall(r"(\w+) <?([\d.]+)", "\n".join(screen(start)[:8]))) for start in (
        "fit gpt2 --on A100 --micro-batch 8 --compile", "fit gpt2 --on A100 --micro-batch 8 --accumulate"))  # fmt: skip
    assert "gradients" not in once and often["gradients"] == often["parameters"] == once["parameters"]
    steps = [number(next(line for line in screen(start) if line.startswith("step"))) for start in ("fit gpt2 --on A100 --micro-batch 8 --acc",)]
    eager = number(table(screen("fit gpt2 --on A100,8xA100"))["A100"]["step"]) / 1e3
    assert 62 * eager < steps[0] < 66 * eager


def test_serving_holds_the_weights_and_no_more_than_the_devices_have(screen: Callable[[str], list[str]]) -> None:
    shown = screen("fit llama3-70b --on 8xH100 --infer")
    weights = 2 * 70.55e9
    capacity = find("H100").memory_bytes
    rows = [re.match(r" *([\d.]+) s +([\d.]+) +(\d+)% +(\d+)  ([\d ]+?)(?:  best.*)?$", line) for line in shown]
    splits = [row for row in rows if row is not None]
    assert len(splits) == 8 and weights > capacity
    for row in splits:
        latency, rate, fullest, devices, blocks = float(row[1]), float(row[2]), int(row[3]) / 100, int(row[4]), list(map(int, row[5].split()))
        assert len(blocks) == devices <= 8 and sum(blocks) == 82, "80 blocks, the embedding and the head"
        assert weights / devices / capacity < fullest + 0.005 <= 1.005
        assert rate <= 1.01 * devices / latency, "each device is busy no more than all of the time"
        assert latency >= 2 * 70.55e9 * 8192 / find("H100").peak("bfloat16"), "two FLOPs a parameter and token, at the peak"
    one = "\n".join(screen("fit llama3-8b --on L4 --infer"))
    assert one.startswith("FITS") and f"█ parameters {2 * 8_030_261_248 / GIB:.1f}" in one
