"""Spoiled files of every kind, given to every command that reads them: an answer or one line, never a bug, a hang or code.

FORETELL_FUZZ_CASES=2000 runs that many (make fuzz-readers); the suite runs a few hundred. FORETELL_FUZZ_SEED draws others.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
import random
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from foretell import zoo
from foretell.checkpoint import format as layout
from foretell.cli import common, main
from foretell.errors import UserError
from foretell.export import read as theirs
from foretell.export.read import layout as theirs_layout
from foretell.export.read import words as theirs_words
from foretell.hardware import files as hardware_files
from foretell.hardware import parse
from foretell.hardware.probe import journal
from foretell.plan import file as plans
from foretell.price import machine
from foretell.prove import seal
from foretell.prove.types import Config, Forecast, Sealed
from foretell.report import comparison
from foretell.report.html import detail as html_detail
from foretell.report.html import front as html_front
from foretell.search.traces import child as tracer
from foretell.search.traces.needed import Traces, question
from foretell.trace.sandbox import child
from foretell.trace.sandbox.process import WorkerEnded
from foretell.trace.store import cache
from foretell.trace.store import file as trace_file
from foretell.trace.store import traces as stored
from tests.pure import mutations as spoil
from tests.pure import reader_cases as more
from tests.pure import reader_cases_serving as serving
from tests.pure import report_sample as sample
from tests.pure.checkpoint_cases import save, saved_in, some_tensors

CASES = int(os.environ.get("FORETELL_FUZZ_CASES", "0"))
SEED = os.environ.get("FORETELL_FUZZ_SEED", "0")
USUAL, USUAL_COSTLY = 3, 1
"""Spoiled files for each reader in `make test`; fewer where a step is predicted of each. Slow are as many more."""
LIMIT_SECONDS = 60.0
"""After which a case hangs; generous, since other work may run beside it."""

Spoil = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Something that reads a file, and how to spoil that."""

    name: str
    spoils: str
    """The file, under the corpus."""
    how: Spoil
    words: tuple[str, ...] = ()
    """Of the command; `{}` is the folder of the case."""
    call: Callable[[Path], Any] | None = None
    """Instead of a command: may raise a `UserError` alone."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def costly(self) -> bool:
        return self.words[:1] in (("fit",), ("report",)) or "--accuracy" in self.words


# ---------------------------------------------------------------- files to spoil


EVIL = "import pathlib\npathlib.Path(__file__).with_name('canary').touch()\ndef build(): raise SystemExit\n"
ACCELERATE = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n"
DEEPSPEED = {
    "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "gradient_clipping": 1.0,
}  # fmt: skip
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 64
[parallelism]
data_parallel_shard_degree = -1
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = false
"""
TRAINER = {"output_dir": "a", "per_device_train_batch_size": 2, "bf16": True, "fsdp": "full_shard", "fsdp_config": {"version": 2}, "optim": "sgd"}
LIGHTNING = "trainer:\n  devices: 1\n  precision: bf16-mixed\n  strategy:\n    class_path: FSDPStrategy\n    init_args: {state_dict_type: full}\n"
TOML = 'schema_version = 1\nnodes = 2\ndevices_per_node = 8\ndevice = "H100"\nmemory = "60GiB"\nlink = "4xIB200"\nprice_per_hour = 2.5\n'
GROUPS = 'inter = "Eth25"\n[[groups]]\ndevices_per_node = 8\ndevice = "H100"\n[[groups]]\nnodes = 2\ndevices_per_node = 4\ndevice = "A100"\n'
PRICES = 'region = "FR"\npue = 1.2\n[dollars_per_hour]\nH100 = 2.10\n[carbon_g_per_kwh]\ndefault = 30\nFR = 40\n'


def sealed_forecast() -> Sealed:
    config = Config(index=0, model="gpt2", overrides={"layers": 3}, micro_batch=1, near=0.9)
    row = Forecast(
        config=config, bytes={"allocated": 1000, "reserved": 2000, "device": 3000}, seconds=0.1, verdict="fits",
        bands={"allocated": (990, 1010), "reserved": (1940, 2060), "device": (2800, 3200), "seconds": (0.09, 0.12)},
        limit_bytes=1 << 31, limit_verdict="fits",
    )  # fmt: skip
    return Sealed(
        seed="s", count=2, device="CPU", backend="cpu", memory_bytes=1 << 33, rules={"seconds": 1.0}, pacers={"gpt-tiny": 0.01},
        rows=(row, replace(row, config=replace(config, index=3, model="resnet50", overrides={}))), passed_over=((1, "too long"),),
    )  # fmt: skip


def build_corpus(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One good file of every kind. The traces are made in this process, which has torch; then none are made any more."""
    monkeypatch.setenv("FORETELL_CACHE", str(at / "cache"))
    at.mkdir()
    (at / "evil.py").write_text(EVIL)
    asked, _ = sample.told(sample.plan(mesh=sample.Mesh(dp_shard=2), blocks=sample.RECOMPUTE))
    traces = Traces(capability=(9, 0))
    for wanted in (wanted for mode in ("keep", "recompute") for wanted in traces._needed(asked, mode)):
        reply = tracer.answer(wanted)
        stored.keep(wanted, reply.pop("text"), reply)
    sample.with_front(sample.run_folder(at / "run", asked))
    (at / "run" / "settings.json").write_text(json.dumps({"steps": 30, "lr": 1e-3, "log": ["wandb"], "schedule": "cosine", "mtbf": 3600.0}))
    html_detail.keep_traces(asked, at / "run")
    plans.write(sample.told(sample.piped())[0], at / "piped.json")
    html_front.write(sample.front(), at / "piped.json")
    plans.write(replace(asked, model={**asked.model, "model": f"{at / 'evil.py'}:build"}), at / "evil.json")
    for name, text in (("toml.toml", TOML), ("groups.toml", GROUPS), ("prices.toml", PRICES), ("accelerate.yaml", ACCELERATE),
                       ("train.toml", TITAN), ("lightning.yaml", LIGHTNING), ("args.json", json.dumps(TRAINER))):  # fmt: skip
        (at / name).write_text(text)
    hardware_files.save(parse("2x8xH100@IB400"), at / "cluster.json")
    hardware_files.save(parse("8xH100+4xA100,join=Eth25"), at / "unlike.json")
    (at / "ds.json").write_text(json.dumps(DEEPSPEED))
    digest = seal.write(sealed_forecast(), at / "sealed.json")
    measured = {"allocated": 1005, "reserved": 2100, "device": 3000, "seconds": 0.11, "pacers": {"gpt-tiny": 0.012}}
    rows = [{"seal": digest, "position": place, "measured": measured, "limited": {"ran": not place}} for place in range(2)]
    (at / "sealed.rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    profiles = Path(zoo.__file__).parents[1] / "hardware" / "profiles"
    small_journal(profiles / "CPU-one-thread.rows.jsonl.gz", at / "journal.jsonl")
    (at / "cache" / "profiles").mkdir()
    shutil.copy(profiles / "H200-SXM-141GB.json", at / "cache" / "profiles")
    trace_file.save(sample.traces("bf16-mixed", "keep", "H100", ""), at / "trace.json")
    save(at / "saved" / "checkpoints", some_tensors())
    shutil.copytree(saved_in(at / "saved" / "checkpoints"), at / "one")
    (at / "comparison.json").write_text(json.dumps(comparison.of_folder(at / "run").to_json()))
    more.build(at, asked)
    serving.build(at, asked)
    no_more_tracing(monkeypatch)


def no_more_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of gpt-tiny for `fit` is answered at once, one thread after the other; whatever else would be traced was killed."""
    known: dict[str, dict[str, Any]] = {}
    turn = threading.Lock()  # a trace in this process changes torch until it is done

    def ask(module: str, requests: Sequence[Mapping[str, Any]], **_: Any) -> list[dict[str, Any]] | WorkerEnded:
        (asked,) = requests[:1]
        if asked["source"]["model"] != "gpt-tiny" or asked["source"]["overrides"] or not module.startswith("foretell.trace.sandbox."):
            return WorkerEnded([], -9, "")
        key = question(asked)
        with turn:
            if key not in known:
                known[key] = child.trace_asked(asked)
        return [copy.deepcopy(known[key])]

    monkeypatch.setattr(child, "ask", ask)
    for words in (FIT, ("fit", "gpt-tiny", "--on", "H200")):
        assert quietly(main, list(words))[0] == 0


FIT = ("fit", "gpt-tiny", "--on", "H100")


def small_journal(source: Path, target: Path) -> None:
    """The head of a real journal and a few lines of every stage."""
    head, *lines = gzip.decompress(source.read_bytes()).splitlines()
    kinds: dict[str, list[bytes]] = {}
    for line in lines:
        kinds.setdefault(json.loads(line)[0], []).append(line)
    target.write_bytes(b"\n".join([head, *(line for found in kinds.values() for line in found[:4])]) + b"\n")


# ---------------------------------------------------------------- seals that are right on files that are not


def forecast_spoiled(content: bytes, rng: random.Random) -> bytes:
    found = spoil.json_spoiled(content, rng)
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        value = json.loads(found)
        value[seal.HASH] = seal.digest(value)
        return spoil.text_of(value)
    return found


def manifest_spoiled(content: bytes, rng: random.Random) -> bytes:
    value = json.loads(content)
    first = {"digest"} & value.keys() or {next(iter(value))}
    text = spoil.json_spoiled(json.dumps({name: item for name, item in value.items() if name not in first}).encode(), rng)
    rest = b'",\n' + text[1:].strip() + b"\n"
    return layout._FIRST + layout._digest(rest) + rest


def entry_spoiled(kind: str) -> Callable[[Path, random.Random], None]:
    """A cache entry with wrong types under a checksum that is right, or one that is not."""

    def spoiled(case: Path, rng: random.Random) -> None:
        path = rng.choice(sorted((case / "cache" / kind).iterdir()))
        seal_line, _, rest = path.read_bytes().partition(b"\n")
        inner = json.loads(rest)
        if kind == "traces" and rng.random() < 0.7:
            inner["trace"] = spoil.json_spoiled(inner["trace"].encode(), rng).decode(errors="replace")
            rest = json.dumps(inner).encode()
        else:
            rest = spoil.json_spoiled(rest, rng)
        path.write_bytes((cache._seal(rest, kind, path.stem) if rng.random() < 0.9 else seal_line + b"\n") + rest)
        if kind == "traces":
            shutil.rmtree(case / "cache" / "answers")

    return spoiled


# ---------------------------------------------------------------- readers


def plan_readers() -> Iterator[Reader]:
    for name in ("run/plan.json", "piped.json", "evil.json"):
        yield Reader(name=f"show {name}", spoils=name, how=spoil.json_spoiled, words=("show", f"{{}}/{name}"))
        yield Reader(name=f"report {name}", spoils=name, how=spoil.json_spoiled, words=("report", f"{{}}/{name}", "--out", "{}/page.html"))
    yield Reader(name="show --json", spoils="piped.json", how=spoil.json_spoiled, words=("show", "{}/piped.json", "--json"))
    for tool in ("accelerate", "deepspeed", "torchtitan", "slurm", "k8s", "skypilot"):
        source = "evil.json" if tool in ("slurm", "k8s") else "run/plan.json"
        words = ("export", f"{{}}/{source}", "--to", tool, "--out", "{}/exported")
        yield Reader(name=f"export {tool}", spoils=source, how=spoil.json_spoiled, words=words)
    yield Reader(name="front", spoils="piped.front.json", how=spoil.json_spoiled, words=("report", "{}/piped.json", "--out", "{}/page.html"))


def run_readers() -> Iterator[Reader]:
    kinds: tuple[tuple[str, Spoil], ...] = (
        ("plan.json", spoil.json_spoiled), ("measurement.json", spoil.json_spoiled), ("settings.json", spoil.json_spoiled),
        ("log.jsonl", spoil.lines_spoiled), ("plan.front.json", spoil.json_spoiled),
        ("traces.json.gz", spoil.packed(spoil.json_spoiled)), ("traces.json.gz", spoil.packed(trace_inside_spoiled)),
    )  # fmt: skip
    for number, (name, how) in enumerate(kinds):
        yield Reader(name=f"report run, {name} {number}", spoils=f"run/{name}", how=how, words=("report", "{}/run"))
    for name, how in kinds[:2]:
        yield Reader(name=f"compare, {name}", spoils=f"run/{name}", how=how, words=("compare", "{}/run"))
        yield Reader(name=f"compare --json, {name}", spoils=f"run/{name}", how=how, words=("compare", "{}/run", "--json"))
    read = comparison.Comparison.from_json
    yield Reader(
        name="comparison file", spoils="comparison.json", how=spoil.json_spoiled,
        call=lambda at: comparison.render(read(parsed(at / "comparison.json"))),
    )  # fmt: skip


def trace_inside_spoiled(content: bytes, rng: random.Random) -> bytes:
    value = json.loads(content)
    one = value["traces"][rng.choice(sorted(value["traces"]))]
    one["trace"] = spoil.json_spoiled(one["trace"].encode(), rng).decode(errors="replace")
    return spoil.text_of(value)


def parsed(path: Path) -> Any:
    """What is no JSON is no case of a reader that is given JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}


def hardware_readers() -> Iterator[Reader]:
    for name in ("toml.toml", "groups.toml", "cluster.json", "unlike.json"):
        how = spoil.json_spoiled if name.endswith(".json") else spoil.text_spoiled
        yield Reader(name=f"hardware {name}", spoils=name, how=how, words=("hardware", f"{{}}/{name}"))
        yield Reader(name=f"fit --on {name}", spoils=name, how=how, words=(*FIT[:3], f"{{}}/{name}"))
    yield Reader(name="hardware --json", spoils="unlike.json", how=spoil.json_spoiled, words=("hardware", "{}/unlike.json", "--json"))
    prices = {"FORETELL_PRICES": "{}/prices.toml"}
    yield Reader(name="prices", spoils="prices.toml", how=spoil.text_spoiled, words=("hardware", "H100"), environment=prices)
    profile = "cache/profiles/H200-SXM-141GB.json"
    yield Reader(name="accuracy", spoils=profile, how=spoil.json_spoiled, words=("hardware", "H200", "--accuracy"))
    yield Reader(name="fit with a profile", spoils=profile, how=spoil.json_spoiled, words=(*FIT[:3], "H200"))
    yield Reader(name="journal", spoils="journal.jsonl", how=spoil.lines_spoiled, call=lambda at: journal.gather(at / "journal.jsonl"))


def other_readers() -> Iterator[Reader]:
    yield Reader(name="sealed", spoils="sealed.json", how=forecast_spoiled, words=("prove", "--show", "{}/sealed.json"))
    yield Reader(name="sealed rows", spoils="sealed.rows.jsonl", how=spoil.lines_spoiled, words=("prove", "--show", "{}/sealed.json"))
    yield Reader(name="trace file", spoils="trace.json", how=spoil.json_spoiled, call=lambda at: trace_file.load(at / "trace.json"))
    yield Reader(name="accelerate", spoils="accelerate.yaml", how=spoil.text_spoiled, words=(*FIT, "--from", "{}/accelerate.yaml"))
    yield Reader(name="deepspeed", spoils="ds.json", how=spoil.json_spoiled, words=(*FIT, "--from", "{}/ds.json"))
    yield Reader(name="torchtitan", spoils="train.toml", how=spoil.text_spoiled, words=(*FIT, "--from", "{}/train.toml"))
    for name, how in (("accelerate.yaml", spoil.text_spoiled), ("ds.json", spoil.json_spoiled), ("train.toml", spoil.text_spoiled),
                      ("args.json", spoil.json_spoiled), ("lightning.yaml", spoil.text_spoiled)):  # fmt: skip
        yield Reader(name=f"--from {name}", spoils=name, how=how, call=whole_reader(name))
    for file in ("rank-00000.safetensors", "manifest.json"):
        yield Reader(name=f"ckpt verify, {file}", spoils=f"one/{file}", how=spoil.bytes_spoiled, words=("ckpt", "verify", "{}/one"))


def whole_reader(name: str) -> Callable[[Path], Any]:
    return lambda at: read_whole(at / name)


def read_whole(path: Path) -> None:
    """As `plan --from` does, but for the costing: what was read, in words, and the layout with stages and blocks."""
    found = theirs.read(path)
    told = theirs_words.content(found, path, {})
    assert all("\n" not in line for line in theirs_words.lines(found, told))
    given = theirs_layout.described(found, {}, theirs_layout.ranks(found, {}) or 8)
    blocks = [f"blocks.{number}" for number in range(32)]
    given.pipeline(blocks), given.residency(blocks)


def cache_reader(kind: str) -> Reader:
    return Reader(name=f"cache {kind}", spoils="", how=spoil.json_spoiled, words=FIT)


def forged_readers() -> Iterator[Reader]:
    """Manifests of checkpoints under a digest that is right."""
    for command in ("list", "verify", "show"):
        yield Reader(name=f"ckpt {command}", spoils="one/manifest.json", how=manifest_spoiled, words=("ckpt", command, "{}/one"))


READERS = [*plan_readers(), *run_readers(), *hardware_readers(), *other_readers(), cache_reader("answers"), cache_reader("traces")]
READERS += [Reader(name=one.name, spoils=one.spoils, how=one.how, words=one.words, call=one.call) for one in (*more.CASES, *serving.CASES)]
READERS += forged_readers() if CASES else ()


FURTHER = {
    **dict.fromkeys(("torchtitan", "deepspeed"), "the same file is read whole below; accelerate's is costed too"),
    **dict.fromkeys(("fit --on groups.toml", "fit --on unlike.json", "fit --on toml.toml"), "`hardware` reads the same file; `fit` reads others"),
    **dict.fromkeys(("accuracy",), "`fit` reads the same profile"),
}
"""Readers that cost a step for what another reads too."""


# ---------------------------------------------------------------- one case


class Hang(BaseException):
    """A case that takes too long."""


def quietly(work: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What it returns, and what it says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return work(*args), said.getvalue()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def failure(reader: Reader, case: Path, *, good: bool = False) -> str:
    """What is wrong with how a reader took its file; empty where nothing is. A `good` file has to be read."""
    words = [word.replace("{}", str(case)) for word in reader.words]
    environment = {name: value.replace("{}", str(case)) for name, value in reader.environment.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_CACHE", str(case / "cache"))
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(common, "fail", failed)
        machine._KNOWN.clear()  # kept by date: a spoiled profile has that of the good one
        try:
            with time_limit(LIMIT_SECONDS):
                if reader.call is not None:
                    with contextlib.nullcontext() if good else contextlib.suppress(UserError):
                        reader.call(case)
                    return ""
                status, said = quietly(main, words)
        except Hang:
            return "hangs"
        except Exception:
            return traceback.format_exc()
    if status not in ((0, 1) if good and not reader.name.startswith("export") else (0, 1, 2)):
        return said or f"exit {status}"
    if status == 2 and "\n" in (first := said.strip().partition("\n")[0]):
        return f"more than a line: {first}"
    return "code was run" if (case / "canary").exists() else ""


_fail = common.fail


def failed(error: Exception) -> int:
    """As the command line tells it, with the traceback of a bug."""
    status = _fail(error)
    if status == common.BUG:
        traceback.print_exception(error)
    return status


def spoiled_case(reader: Reader, corpus: Path, case: Path, seed: str) -> None:
    shutil.copytree(corpus, case, symlinks=True)
    rng = random.Random(f"{reader.name}/{seed}")
    if reader.spoils:
        path = case / reader.spoils
        path.write_bytes(reader.how(path.read_bytes(), rng))
    else:
        entry_spoiled(reader.name.split()[1])(case, rng)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        at = tmp_path_factory.mktemp("readers") / "corpus"
        build_corpus(at, patch)
        yield at


# ---------------------------------------------------------------- tests


def marked(reader: Reader) -> Any:
    return pytest.param(reader, id=reader.name, marks=[pytest.mark.slow(reason=FURTHER[reader.name])] if reader.name in FURTHER else [])


@pytest.mark.parametrize("reader", [marked(reader) for reader in READERS])
@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow(reason="as many more spoiled files for the same readers"))])
def test_spoiled_files_are_an_answer_or_one_line(reader: Reader, again: bool, corpus: Path, tmp_path: Path) -> None:
    if again and CASES:
        pytest.skip("as many as were asked for are run at once")
    shutil.copytree(corpus, tmp_path / "good", symlinks=True)
    assert failure(reader, tmp_path / "good", good=True) == "", "else what is spoiled is never looked at"
    count = max(1, CASES // len(READERS)) if CASES else USUAL_COSTLY if reader.costly else USUAL
    found = []
    for number in range(count * again, count * (again + 1)):
        case = tmp_path / f"{number}"
        spoiled_case(reader, corpus, case, f"{SEED}/{number}")
        said = failure(reader, case)
        if said:
            found.append(f"case {SEED}/{number} of {reader.name}:\n{said}")
        shutil.rmtree(case)
    assert not found, f"{len(found)} of {count}\n\n" + "\n\n".join(found[:8])
