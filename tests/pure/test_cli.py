"""The command line from outside: exit codes, what goes to stdout and stderr, one JSON object whatever happens."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import foretell
from foretell import zoo
from foretell.cli import names
from foretell.errors import UserError
from foretell.hardware.profile import Profile, save
from foretell.options import words as option_words
from foretell.report import schema
from tests.further import one_in
from tests.pure import warm

ROOT = Path(__file__).resolve().parents[2]
FRAME = {"schema_version", "versions", "assumptions"}
ASKED = ("fit", "gpt2", "--on", "H100")

STAND_IN = """
import os, sys, types
from foretell.quantities import Memory, Prediction, Remedy, Throughput, Time
G = 1024**3
TIME = Time(step_seconds=0.142, low_seconds=0.131, high_seconds=0.155, breakdown={"gemm": 0.142}, phases={"forward": 0.1},
            binds="compute", provenance="measured", device_seconds=0.142, host_seconds=0.02)
RATE = Throughput(unit="tokens", per_step=8192, per_second=57690.0, per_second_per_device=57690.0)
def answer(verdict):
    memory = Memory(allocated_bytes=50 * G, reserved_bytes=55 * G, device_bytes=60 * G, capacity_bytes=79 * G,
                    margin_bytes=19 * G, host_bytes=0, bands={}, categories={"parameters": 50 * G}, holders=(), phases=(),
                    provenance={})
    return Prediction(verdict=verdict, model={"source": "gpt2"}, hardware={"device": {"name": "H100"}}, parameters=1,
                      memory=memory, versions={"timm": "1.0"}, time=TIME, throughput=RATE,
                      remedies=(Remedy(change="less", flag="--recompute full", saves_bytes=G, fits=True, verdict="fits"),))
api = types.ModuleType("foretell.api")
"""
"""An api that answers at once: what is tried here is what the command line makes of its answers and failures."""


def environment(**changes: str) -> dict[str, str]:
    dropped = ("RANK", "NO_COLOR", "COLUMNS", "FORETELL_DEBUG", "FORCE_COLOR")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "PYTHONPATH": str(ROOT), "FORETELL_FASTER_SECONDS": "0", **changes}  # stand-ins of the API have answers alone


def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return warm.run(*words, env=environment(**changes))


def start(code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, from the beginning."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(**changes), capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )


def script(body: str, *words: str) -> str:
    """A foretell whose api.fit is `body`."""
    setup = f"{STAND_IN}\ndef fit(model, **options):\n{textwrap.indent(body, '    ')}\napi.fit = fit\n"
    start = "import foretell\nsys.modules['foretell.api'] = foretell.api = api\nfrom foretell.cli import main\n"
    return f"{setup}{start}sys.exit(main({list(words or ASKED)!r}))"


def run_with(body: str, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return warm.run(env=environment(**changes), code=script(body, *words))


def only_object(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    assert set(found) >= FRAME
    return found


# ---------------------------------------------------------------- light


ALSO = pytest.mark.slow(reason="another command that answers alike")


@pytest.mark.parametrize(
    "words",
    [
        ["--help"], pytest.param(["fit", "--help"], marks=ALSO), ["zoo"], pytest.param(["zoo", "query", "gpt", "--json"], marks=ALSO), ["version"],
        pytest.param(["doctor", "--json"], marks=ALSO), ["fit", "nope", "--on", "H100"],
    ],
)  # fmt: skip
def test_answers_that_need_no_torch_do_not_import_it(words: list[str]) -> None:
    heavy = "[name for name in ('torch', 'numpy', 'transformers') if name in sys.modules]"
    code = f"import sys; from foretell.cli import main; main({words!r}); print({heavy}, file=sys.stderr)"
    done = start(code)
    assert done.returncode == 0 and done.stderr.strip().splitlines()[-1] == "[]"


def test_help_answers_at_once() -> None:
    def busy() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    seconds = []
    for _ in range(4):
        before = busy()
        done = subprocess.run([sys.executable, "-m", "foretell", "--help"], env=environment(), capture_output=True, text=True, check=True, cwd=ROOT)
        assert done.stdout == run("--help").stdout
        seconds.append(busy() - before)
    assert min(seconds) < 0.5, "processor time, the best of four: other tests run beside this one"


def test_help_names_every_command_and_option() -> None:
    commands = run("--help").stdout
    listed = re.findall(r"^  (\w+)  ", commands[commands.index("Commands:") :], re.MULTILINE)
    known = "fit plan run serve tune watch verify compare report probe hardware zoo doctor"
    assert sorted(listed) == sorted(known.split())
    for name in names.UNDER.values():
        parent, child = name.split()
        assert f"foretell {name}" in " ".join(run(parent, "--help").stdout.split()) or parent == "zoo"
        told = run(parent, child, "--help").stdout
        assert told == run(child, "--help").stdout and f"Usage: foretell {name} " in told
    text = run("fit", "--help", COLUMNS="200").stdout
    for option in ("--on", "--micro-batch", "--seq", "--image", "--optimizer", "--precision", "--recompute",
                   "--accumulate", "--clip", "--lora", "--nf4", "--freeze", "--infer", "--set", "--hint", "--loss",
                   "--expandable-segments", "--compile", "--tokens", "--samples", "--epochs", "--dataset-size", "--region",
                   "--price", "--footprint", "--trace-out", "--time-limit", "--json", "--no-cache", "--debug"):  # fmt: skip
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{option} "))
        assert len(line.split()) > 3, f"{option} has no help"
    assert "check" in run("zoo", "--help").stdout
    assert run().stdout == commands, "nothing asked is a question for help"


def test_the_version_is_the_package_s() -> None:
    assert f"foretell {foretell.__version__} " in run("--version").stdout
    assert only_object(run("version", "--json"))["versions"]["foretell"] == foretell.__version__


def test_the_package_offers_fit_and_nothing_it_has_not() -> None:
    assert {"fit", "__version__"} <= set(dir(foretell))
    with pytest.raises(AttributeError, match="no attribute 'fti'"):
        _ = foretell.fti


# ---------------------------------------------------------------- bad input

BAD = {
    "unknown model": (["fit", "lama3-8b", "--on", "H100"], "UnknownName", "llama3-8b"),
    "unknown hardware": (["fit", "gpt2", "--on", "H10O"], "UnknownName", "H100"),
    "no such file": (["fit", "nowhere.py:build", "--on", "H100"], "MissingModel", "nowhere.py"),
    "negative micro-batch": (["fit", "gpt2", "--on", "H100", "--micro-batch", "-1"], "UserError", "micro_batch"),
    "no tokens": (["fit", "gpt2", "--on", "H100", "--seq", "0"], "UserError", "seq"),
    "negative image": (["fit", "resnet50", "--on", "H100", "--image", "-224"], "UserError", "image"),
    "negative rank": (["fit", "gpt2", "--on", "H100", "--lora", "-4"], "UserError", "lora"),
    "set without value": (["fit", "gpt2", "--on", "H100", "--set", "layers"], "UserError", "KEY=VALUE"),
    "set of nothing known": (["fit", "gpt2", "--on", "H100", "--set", "layerz=2"], "UserError", "layers"),
    "hint without number": (["fit", "gpt2", "--on", "H100", "--hint", "a=b"], "UserError", "PATTERN=NUMBER"),
    "unknown optimizer": (["fit", "gpt2", "--on", "H100", "--optimizer", "adamx"], "UnknownName", "adamw"),
    "unknown precision": (["fit", "gpt2", "--on", "H100", "--precision", "bf61"], "UnknownName", "bf16"),
    "4 bits without LoRA": (["fit", "gpt2", "--on", "H100", "--nf4"], "UserError", "--lora"),
    "tokens of no unit": (["fit", "gpt2", "--on", "H100", "--tokens", "1X"], "UserError", "1X"),
    "no tokens to run": (["fit", "gpt2", "--on", "H100", "--tokens", "0"], "UserError", "--tokens"),
    "negative samples": (["fit", "resnet50", "--on", "H100", "--samples", "-3M"], "UserError", "-3M"),
    "endless samples": (["fit", "resnet50", "--on", "H100", "--samples", "1e999"], "UserError", "1e999"),
    "two whole runs": (["fit", "gpt2", "--on", "H100", "--tokens", "1T", "--samples", "3"], "UserError", "one of"),
    "epochs of what": (["fit", "resnet50", "--on", "H100", "--epochs", "90"], "UserError", "--dataset-size"),
    "data set without epochs": (["fit", "resnet50", "--on", "H100", "--dataset-size", "1M"], "UserError", "--epochs"),
    "unknown region": (["fit", "gpt2", "--on", "H100", "--region", "Narnia"], "UnknownName", "Narnia"),
    "negative price": (["fit", "gpt2", "--on", "H100", "--price", "-2"], "UserError", "--price"),
    "no price": (["fit", "gpt2", "--on", "H100", "--price", "nan"], "UserError", "--price"),
    "timeline into a folder": (["fit", "gpt2", "--on", "H100", "--trace-out", "."], "UserError", "folder"),
    "timeline into nowhere": (["fit", "gpt2", "--on", "H100", "--trace-out", "no/where.json"], "UserError", "no/where.json"),
    "unknown zoo name": (["zoo", "check", "gtp2"], "UnknownName", "gpt2"),
    "no hardware": (["fit", "gpt2"], "UsageError", "--on"),
    "not a number": (["fit", "gpt2", "--on", "H100", "--seq", "many"], "UserError", "--seq"),
    "unknown option": (["fit", "gpt2", "--on", "H100", "--sequence", "3"], "UsageError", "--sequence"),
    "unknown command": (["fitt", "gpt2"], "UsageError", "fit"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_on_stderr_and_exit_2(case: str) -> None:
    words, _, told = BAD[case]
    done = run(*words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    first = done.stderr.splitlines()[0]
    assert first.startswith("error: ") and "; try: " in first and told in first
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("case", one_in(4, BAD, "the same error, which is told on stderr above"))
def test_bad_input_with_json_is_one_object_on_stdout(case: str) -> None:
    words, kind, told = BAD[case]
    done = run(*words, "--json")
    assert done.returncode == 2
    assert done.stderr == ""
    found = only_object(done)
    jsonschema.Draft202012Validator(schema.load()).validate(found)
    assert found["error"]["kind"] == kind
    assert told in found["error"]["message"] + found["error"]["remedy"]
    assert found["error"]["remedy"]


def test_debug_adds_the_traceback() -> None:
    for done in (run(*BAD["unknown model"][0], "--debug"), run(*BAD["unknown model"][0], FORETELL_DEBUG="1")):
        assert done.returncode == 2
        assert "Traceback" in done.stderr and done.stderr.startswith("error: ")


# ---------------------------------------------------------------- values of options


@pytest.mark.parametrize(
    ("word", "value"),
    [("a=1", 1), ("a=1.5", 1.5), ("a=true", True), ("a=False", False), ("a=None", None), ("a=null", None),
     ("a=[1,2]", [1, 2]), ("a=gelu", "gelu"), ("a=b=c", "b=c"), ('a="3"', "3"), ("a=NaN", "NaN")],
)  # fmt: skip
def test_settings_are_json_or_text(word: str, value: Any) -> None:
    found = option_words.overrides([word])
    assert found == {"a": value} and type(found["a"]) is type(value)


def test_a_later_setting_wins() -> None:
    assert option_words.overrides(["a=1", "b=2", "a=3"]) == {"a": 3, "b": 2}


@pytest.mark.parametrize("word", ["a", "=1", "a=", " =1"])
def test_settings_without_key_or_value_are_refused(word: str) -> None:
    with pytest.raises(UserError, match="KEY=VALUE"):
        option_words.overrides([word])


def test_hints_are_numbers() -> None:
    assert option_words.hints(["aten.nonzero*=0.5", "x=y=3"]) == {"aten.nonzero*": 0.5, "x=y": 3.0}
    for word in ("a", "a=", "=1", "a=nan", "a=inf"):
        with pytest.raises(UserError, match="PATTERN=NUMBER"):
            option_words.hints([word])


@pytest.mark.parametrize(
    ("text", "number"),
    [("1T", 1e12), ("300M", 3e8), ("300m", 3e8), ("1.5B", 1.5e9), ("2G", 2e9), ("90", 90.0), ("1_000", 1000.0), ("1e9", 1e9),
     ("1.28e3K", 1.28e6), (" 7 K ", 7e3), ("0.5", 0.5)],
)  # fmt: skip
def test_amounts_may_have_a_suffix(text: str, number: float) -> None:
    assert option_words.amount("--tokens")(text) == number


@pytest.mark.parametrize("text", ["", "T", "1TB", "-1", "0", "0K", "1,5", "nan", "inf", "1e999", "1 2", "_1", "0x10"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--tokens .* is no amount"):
        option_words.amount("--tokens")(text)


def test_options_reach_the_api() -> None:
    body = "assert callable(options.pop('progress')); print(sorted(options.items()), file=sys.stderr); return answer('fits')"
    done = run_with(
        body, "fit", "gpt2", "--on", "8xH100", "--micro-batch", "4", "--seq", "64", "--optimizer", "sgd", "--precision",
        "fp32", "--recompute", "full", "--accumulate", "2", "--clip", "0.5", "--lora", "8", "--nf4", "--freeze", "wte",
        "--freeze", "wpe", "--infer", "--set", "layers=2", "--hint", "a=0.5", "--expandable-segments", "--no-cache",
        "--compile", "--epochs", "90", "--dataset-size", "1.28M", "--region", "FR", "--price", "2.5", "--trace-out", "step.json",
    )  # fmt: skip
    expected = {
        "hardware": "8xH100", "micro_batch": 4, "seq": 64, "image": None, "optimizer": "sgd", "precision": "fp32",
        "recompute": "full", "accumulate": 2, "clip": 0.5, "lora": 8, "nf4": True, "freeze": ("wte", "wpe"),
        "adapter": "lora", "lora_alpha": 8.0, "lora_dropout": 0.0, "lora_targets": None, "lora_train": None, "base": (),
        "infer": True, "overrides": {"layers": 2}, "hints": {"a": 0.5}, "loss": None, "expandable_segments": True,
        "cache": False, "compile": True, "channels_last": False, "tokens": None, "samples": None, "epochs": 90.0, "dataset_size": 1.28e6,
        "region": "FR", "price": 2.5, "trace_out": "step.json", "time_limit": 600.0, "keep_writes": False, "loss_chunks": 1, "mtbf": None,
        "state_format": "fp32", "sync_every": None, "outer_lr": 0.7, "outer_momentum": 0.9, "sync_format": "fp32", "sync_delay": 0,
        "sync_quorum": 0, "sync_grace": 10.0, "kernels": None,
    }  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == str(sorted(expected.items()))


# ---------------------------------------------------------------- answers and failures


@pytest.mark.parametrize(("verdict", "label", "status"), [("fits", "FITS", 0), ("tight", "TIGHT", 0),
                                                          ("no", "DOES NOT FIT", 1), ("unknown", "CANNOT TELL", 1)])  # fmt: skip
def test_the_exit_code_is_the_answer(verdict: str, label: str, status: int) -> None:
    done = run_with(f"return answer({verdict!r})")
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(f"{label}  gpt2 on H100:")
    assert done.stderr == ""
    done = run_with(f"return answer({verdict!r})", "fit", "gpt2", "--on", "H100", "--json")
    assert done.returncode == status
    found = only_object(done)
    jsonschema.Draft202012Validator(schema.load()).validate(found)
    assert found["verdict"] == verdict
    assert found["time"]["step_seconds"] == 0.142 and found["throughput"]["unit"] == "tokens" and found["mfu"] is None
    assert found["versions"]["timm"] == "1.0" and found["versions"]["foretell"] == foretell.__version__


def test_the_suggestion_is_the_typed_command_with_the_remedy() -> None:
    done = run_with("return answer('no')", "fit", "gpt2", "--on", "H100", "--recompute", "none", "--debug")
    *_, command, promise = done.stdout.splitlines()
    assert command.split(maxsplit=1)[1] == "foretell fit gpt2 --on H100 --recompute full" and "predicted: fits" in promise


BUGS = {
    "KeyError": "raise KeyError('parameters')",
    "InternalError": "from foretell.errors import InternalError; raise InternalError('bytes do not add up')",
    "RecursionError": "return fit(model)",
    "SystemExit": "sys.exit(0)",
    "AttributeError": "return 5",
}


@pytest.mark.parametrize("case", BUGS)
def test_a_crash_never_looks_like_an_answer(case: str) -> None:
    done = run_with(BUGS[case])
    assert done.returncode == 70
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("foretell has a bug: ") and "issue tracker" in done.stderr
    done = run_with(BUGS[case], "fit", "gpt2", "--on", "H100", "--json", "--debug")
    assert done.returncode == 70
    found = only_object(done)
    jsonschema.Draft202012Validator(schema.load()).validate(found)
    assert found["error"]["kind"] == {"SystemExit": "InternalError"}.get(case, case)
    assert "Traceback" in found["error"]["detail"]


def test_an_error_of_the_api_is_told_with_its_detail() -> None:
    body = "from foretell.errors import ModelError; raise ModelError('building\\n x failed', 'mend it', 'line 1\\nline 2')"
    done = run_with(body)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: building x failed; try: mend it", "line 1", "line 2"]


def test_a_torch_that_is_missing_is_not_a_bug() -> None:
    done = run_with("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    assert done.returncode == 2
    assert "pip install" in done.stderr


def test_ctrl_c_is_quiet() -> None:
    done = run_with("raise KeyboardInterrupt")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_what_the_model_prints_stays_out_of_the_answer() -> None:
    body = "print('from python'); os.write(1, b'from below\\n'); os.system('echo from a child'); return answer('fits')"
    done = run_with(body, "fit", "gpt2", "--on", "H100", "--json")
    assert only_object(done)["verdict"] == "fits"
    assert all(line in done.stderr for line in ("from python", "from below", "from a child"))


def test_only_rank_0_prints() -> None:
    for words in (("fit", "gpt2", "--on", "H100"), ("fit", "gpt2", "--on", "H100", "--json")):
        quiet = run_with("return answer('no')", *words, RANK="1")
        assert (quiet.returncode, quiet.stdout, quiet.stderr) == (1, "", "")
        assert run_with("return answer('no')", *words, RANK="0").stdout
    quiet = run_with("raise KeyError(1)", RANK="3")
    assert (quiet.returncode, quiet.stderr) == (70, "")


def test_a_closed_pipe_is_no_failure() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m foretell zoo | head -1; echo ${{PIPESTATUS[0]}}"],
        env=environment(), capture_output=True, text=True, timeout=60, check=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.splitlines()[1] == "0"
    assert done.stderr == ""


def test_a_stream_that_knows_only_ascii_gets_ascii() -> None:
    done = start(script("return answer('no')"), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 1
    assert done.stdout.isascii() and "PPPPP" in done.stdout


# ---------------------------------------------------------------- on a terminal


def on_terminal(body: str, **changes: str) -> str:
    """Everything a terminal shows."""
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script(body)], stdout=side, stderr=side, stdin=side, cwd=ROOT,
        env=environment(TERM="xterm-256color", COLUMNS="100", **changes),
    )  # fmt: skip
    os.close(side)
    shown = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(main)
    assert process.wait(timeout=60) == 0
    return shown.decode()


def test_colour_only_where_it_is_wanted() -> None:
    assert "\x1b[1;32mFITS\x1b[0m" in on_terminal("return answer('fits')")
    assert "\x1b" not in on_terminal("return answer('fits')", NO_COLOR="1")
    assert "\x1b" not in run_with("return answer('fits')").stdout


def test_a_sign_of_life_after_a_second_and_not_before() -> None:
    slow = on_terminal("import time; time.sleep(1.5); return answer('fits')")
    assert "tracing gpt2 … 1 s" in slow
    assert slow.index("tracing") < slow.index("FITS")
    assert "tracing" not in on_terminal("return answer('fits')")


# ---------------------------------------------------------------- accuracy of measured devices

LEARNED = {
    "rows": 2345.0, "plain_median": 0.121, "plain_mean": 0.15, "plain_p90": 0.312, "trees_median": 0.031, "trees_mean": 0.049,
    "trees_p90": 0.09, "r2": 0.9981,
}  # fmt: skip
FEW = {"rows": 12.0, "plain_median": 0.2, "plain_mean": 0.25, "plain_p90": 0.5}


PARTS = [{"laws": {"": {}}, "trees": None}]


def profile(folder: Path, **changes: Any) -> None:
    """A user's own profile of an H200."""
    values: dict[str, Any] = {
        "device": "H200-SXM-141GB", "reported_as": "NVIDIA H200", "backend": "cuda", "torch": "2.11.0+cu130", "python": "3.12",
        "host_cpu": "some", "date": "2026-09-20T10:00:00+00:00", "mode": "quick", "missing": ("disk: no room",),
        "ops": {"gemm": {"accuracy": LEARNED, "trees": [{}], "parts": PARTS}, "sort": {"accuracy": FEW, "trees": [], "parts": PARTS}},
        "host": {"references": 14, "error": 0.079, "weights": {"forward": 1.0}, "calls": {}},
    }  # fmt: skip
    save(Profile(**{**values, **changes}), folder / "profiles" / "H200-SXM-141GB.json")


def test_accuracy_shows_both_estimators_and_which_is_used(tmp_path: Path) -> None:
    profile(tmp_path)
    done = run("hardware", "--accuracy", "H200", FORETELL_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:7] == [
        "H200-SXM-141GB  quick probe of 2026-09-20, torch 2.11.0+cu130; NVIDIA H200",
        "                plain               trees",
        "family   rows  median  mean  90 %  median  mean  90 %     R²  used",
        "gemm    2,345    12.1  15.0  31.2     3.1   4.9   9.0  0.998  trees",
        "sort       12    20.0  25.0  50.0       -     -     -      -  plain",
        "host   14 reference steps, median error 7.9 %, each held out",
        "not measured: disk: no room",
    ]
    (found,) = only_object(run("hardware", "h200", "--accuracy", "--json", FORETELL_CACHE=str(tmp_path)))["profiles"]
    assert found["ops"] == {"gemm": {**LEARNED, "used": "trees"}, "sort": {**FEW, "used": "plain"}}
    assert found["host"] == {"references": 14, "error": 0.079} and found["torch"] == "2.11.0+cu130"


def test_accuracy_of_all_holds_those_with_a_profile(tmp_path: Path) -> None:
    profile(tmp_path, host={}, missing=())
    found = only_object(run("hardware", "--accuracy", "--json", FORETELL_CACHE=str(tmp_path)))["profiles"]
    mine = next(one for one in found if one["device"] == "H200-SXM-141GB")
    assert mine["mode"] == "quick" and mine["host"] is None
    text = run("hardware", "--accuracy", FORETELL_CACHE=str(tmp_path)).stdout
    assert "host   not measured: usual values are assumed" in text and "not measured: disk" not in text


def test_accuracy_without_a_profile_says_what_to_do(tmp_path: Path) -> None:
    done = run("hardware", "T4", "--accuracy", FORETELL_CACHE=str(tmp_path))
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("no profile of T4") and "foretell probe" in done.stdout
    assert only_object(run("hardware", "T4", "--accuracy", "--json", FORETELL_CACHE=str(tmp_path)))["profiles"] == []


# ---------------------------------------------------------------- zoo, doctor, demo


def test_zoo_lists_every_model() -> None:
    text = run("zoo", "--all").stdout
    assert all(f"\n{name} " in text for name in zoo.names())
    found = only_object(run("zoo", "--json"))
    assert [entry["name"] for entry in found["models"]] == list(zoo.names())
    llama = next(entry for entry in found["models"] if entry["name"] == "llama3-8b")
    assert llama["seq"] == 8192 and llama["domain"] == "text" and llama["settings"] == dict(zoo.get("llama3-8b").config)


def test_doctor_tells_what_is_here(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("x" * 1000)
    done = run("doctor", "--json", FORETELL_CACHE=str(tmp_path))
    assert done.returncode == 0
    found = only_object(done)["doctor"]
    assert found["packages"]["torch"] and found["torch"]["version"] == found["packages"]["torch"]
    assert found["cache"] == {"path": str(tmp_path), "exists": True, "writable": True, "bytes": 1000, "files": 1}
    assert found["memory_bytes"] > 2**28 and found["cores"] >= 1
    assert all(item["ok"] or item["remedy"] for item in found["works"])
    assert found["gpus"] or found["no_gpu_because"]
    text = run("doctor", FORETELL_CACHE=str(tmp_path)).stdout
    assert str(tmp_path) in text and found["torch"]["version"] in text


def test_doctor_says_no_without_a_torch_that_will_do(tmp_path: Path) -> None:
    for version, expected in (("2.10.1", False), ("2.11.0+cu128", True), ("3.0", True), (None, False)):
        code = (
            "import sys, json; from importlib import metadata as m; real = m.version\n"
            f"def version(name):\n    if name != 'torch': return real(name)\n    v = {version!r}\n"
            "    if v is None: raise m.PackageNotFoundError(name)\n    return v\n"
            "m.version = version\nfrom foretell.cli import main; sys.exit(main(['doctor', '--json']))"
        )
        done = warm.run(env=environment(), code=code)
        assert done.returncode == (0 if expected else 1), done.stderr
        first = only_object(done)["doctor"]["works"][0]
        assert first["ok"] is expected and first["needed"]


@pytest.mark.slow(reason="a real check through the command line; test_zoo_check.py has the same by function")
def test_a_real_check_of_a_small_model() -> None:
    done = run("zoo", "check", "gpt-tiny", "--json")
    found = only_object(done)["check"]
    assert done.returncode == 0 and found["ok"], done.stderr
    assert found["measured_bytes"] > 3 * 4 * 500_000, "weights, gradients and more than that"
    assert abs(found["relative_error"]) <= 0.1
    assert run("zoo", "check", "llama3-405b").returncode == 2, "too large to really run is not a failed check"


CHECK = """
from dataclasses import dataclass
@dataclass
class Check:
    name: str; predicted_bytes: int; measured_bytes: int; error: float; ok: bool; lines: tuple; prediction: object
    predicted_seconds: object; measured_seconds: object
api.check = lambda name: Check(name, 2**20, 2**20 + 2**15, -0.03, {ok}, ("line one",), answer("fits"), *{seconds})
return 0
"""


@pytest.mark.parametrize(("ok", "seconds"), [(True, (0.078, 0.08)), (False, (None, None))])
def test_a_check_tells_both_numbers(ok: bool, seconds: tuple[float | None, float | None]) -> None:
    body = CHECK.format(ok=ok, seconds=seconds)

    def go(*more: str) -> subprocess.CompletedProcess[str]:
        setup = f"{STAND_IN}\ndef fit():\n{textwrap.indent(body, '    ')}\nfit()\n"
        start = "import foretell\nsys.modules['foretell.api'] = foretell.api = api\nfrom foretell.cli import main\n"
        words = ["zoo", "check", "gpt-tiny", *more]
        return warm.run(env=environment(), code=f"{setup}{start}sys.exit(main({words!r}))")

    done = go()
    assert done.returncode == (0 if ok else 1), done.stderr
    verdict = "OK" if ok else "FAILED"
    assert done.stdout.startswith("FITS  gpt2 on H100"), "a prediction that comes with it is shown first"
    expected = ["", "line one", f"{verdict}  gpt-tiny: predicted 1.0 MiB, measured 1.0 MiB, error -3.0%"]
    if seconds[0]:
        expected.append("    step: predicted 78.0 ms, measured 80.0 ms, error -2.5 %")
    assert done.stdout.splitlines()[-len(expected) :] == expected
    found = only_object(go("--json"))["check"]
    assert (found["name"], found["ok"], found["relative_error"]) == ("gpt-tiny", ok, -0.03)
    assert (found["predicted_seconds"], found["measured_seconds"]) == seconds
    assert found["relative_error_of_seconds"] == (pytest.approx(-0.025) if seconds[0] else None)
    assert found["prediction"]["verdict"] == "fits"


@pytest.mark.slow(reason="shells complete in test_complete.py")
def test_completion_is_offered_and_completes_commands_and_options() -> None:
    for shell, around, wanted in (
        ("complete_bash", {"COMP_WORDS": "foretell f", "COMP_CWORD": "1"}, "fit"),
        ("complete_zsh", {"_TYPER_COMPLETE_ARGS": "foretell plan gpt2 --tok"}, "--tokens"),
    ):
        found = subprocess.run(
            [sys.executable, "-m", "foretell"], env=environment(_FORETELL_COMPLETE=shell, **around), capture_output=True, text=True, check=False,
            timeout=60, cwd=ROOT,
        )  # fmt: skip
        assert wanted in found.stdout, found.stderr
    assert "--install-completion" in run("--help").stdout


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "foretell" / "py.typed").is_file()
