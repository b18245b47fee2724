"""Search for a faster kernel: templates and configurations by default, a language model where one is named."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.api.tune import kernel_setting, memory_bandwidth, quiet
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.tune.clock.statistics import SpeedVerdict
    from foretell.tune.generate.budget import SessionBudget
    from foretell.tune.generate.memory import TunerMemory
    from foretell.tune.generate.rounds import SessionAnswer, SessionOptions
    from foretell.tune.generate.talk import TextGenerator
    from foretell.tune.search.search import SearchAnswer
    from foretell.tune.search.trial import Trials
    from foretell.tune.verify.types import Verdict

SESSION_SHARE = 0.7
"""Of the minutes, for a generator; the rest is left for its best kernel beside every baseline."""


@dataclass(frozen=True, kw_only=True)
class GeneratorAsked:
    """A language model, and what it may take."""

    where: str
    """URL of an OpenAI-compatible endpoint, or a command."""
    model: str = ""
    key_env: str = ""
    """Environment variable with the key; empty: FORETELL_GENERATOR_KEY."""
    price_in: float = 0.0
    """Of a million tokens."""
    price_out: float = 0.0
    money: float | None = None
    without: tuple[str, ...] = ()
    """Ways of working that are left out."""
    rounds: int = 50
    answers: int = 1
    """Kernels of a round."""
    time_limit: float = 180.0
    """Seconds for one answer."""


@dataclass(frozen=True, kw_only=True)
class KernelSearch:
    """What was found; `search` by templates, `session` by a generator."""

    task: str
    text: str
    """The best kernel; empty for none."""
    search: SearchAnswer | None = None
    session: SessionAnswer | None = None
    verdict: Verdict | None = None
    speed: SpeedVerdict | None = None
    out: str = ""
    """Folder with the kernel and what is known of it."""
    interrupted: bool = False

    @property
    def faster(self) -> bool:
        """Verified, and faster than the best of its baselines."""
        if self.search is not None:
            return self.search.faster
        return self.speed is not None and self.speed.faster

    def to_json(self) -> dict[str, Any]:
        parts = {"search": self.search, "session": self.session, "verdict": self.verdict, "speed": self.speed}
        told = {"task": self.task, "faster": self.faster, "text": self.text, "out": self.out, "interrupted": self.interrupted}
        return {**told, **{name: one.to_json() if one is not None else None for name, one in parts.items()}}


def search_kernel(
    task: str, *, minutes: float = 5.0, out: str | None = None, generator: GeneratorAsked | None = None, device: str = "auto", seed: int = 0,
    backward: bool = True, compile: bool = True, again: bool = False, most: int = 0, progress: Callable[[str], None] = quiet,
) -> KernelSearch:  # fmt: skip
    """The fastest verified kernel for the module of `task` (Model, get_inputs, get_init_inputs) that `minutes` find."""
    from foretell.tune.search.trial import Trials
    from foretell.tune.verify import source

    reference = source.reference(task)
    folder = _folder(out or f"{reference.name}.tuned")
    if generator is not None:
        check_generator(generator)
    with _trials(Trials, reference, device, backward, progress) as trials:
        if generator is None:
            from foretell.tune.search.search import search

            found = search(trials, _search_options(minutes, seed, compile, again, most, side_by_side(trials.setting.on_gpu)), doing=progress)
            answer = KernelSearch(task=reference.name, text=found.text, search=found, verdict=found.verdict, speed=found.speed,
                                  interrupted=found.interrupted)  # fmt: skip
        else:
            answer = _generated(trials, generator, minutes, compile, folder, progress)
    return _written(replace(answer, out=str(folder)), folder)


def replay_session(transcript: str) -> SessionAnswer:
    """A recorded session again: the same decisions, no generator asked and no kernel run."""
    from foretell.tune.generate.replay import replayed

    return replayed(Path(transcript))[0]


def curate(transcripts: Sequence[str], out: str, *, least: float = 1.0, held_out: Sequence[str] = ()) -> dict[str, Any]:
    """The verified kernels of sessions as a data set without near-duplicates and without the tasks in the files `held_out`."""
    from foretell.tune.generate import curate as curating

    found = curating.curated([Path(one) for one in transcripts], least=least, held_out=[Path(one).read_text(encoding="utf-8") for one in held_out])
    curating.write(found, Path(out))
    return found.to_json()


# ---------------------------------------------------------------------------------------------- by templates


def _trials(kind: type[Trials], reference: Any, device: str, backward: bool, progress: Callable[[str], None]) -> Trials:
    from foretell.tune.clock.measure import TimingOptions
    from foretell.tune.verify.types import HarnessOptions

    setting = kernel_setting(device, 60.0)
    timing = TimingOptions(backward=backward, bandwidth=memory_bandwidth() if setting.on_gpu else 0.0)
    timing = timing if setting.on_gpu else replace(timing, l2_bytes=CPU_CACHE_BYTES)
    return kind(reference, setting, HarnessOptions(gradients=backward), timing, doing=progress)


CPU_CACHE_BYTES = 8 << 20
"""Of a CPU, that inputs of a loop are larger than, four times over."""


def side_by_side(on_gpu: bool) -> int:
    """Kernels that are verified at a time: on a GPU its compilers are what takes time."""
    from foretell.cores import physical_cores

    return max(1, min(8, physical_cores() // 2)) if on_gpu else 1


def _search_options(minutes: float, seed: int, compile: bool, again: bool, most: int, workers: int) -> Any:
    from foretell.trace.store import cache
    from foretell.tune.search.search import SearchOptions
    from foretell.tune.verify.inside.triton_kernels import installed

    folder = cache.folder() / "kernels"
    return SearchOptions(
        minutes=minutes, seed=seed, compile=compile, again=again, most=most, folder=folder, machine=_machine(), triton=installed(),
        workers=workers,
    )  # fmt: skip


def _machine() -> dict[str, str]:
    """What a time depends on besides the kernel."""
    import torch

    from foretell.hardware.this_machine import cpu_name

    found = {"cpu": cpu_name(), "device": "cpu", "torch": torch.__version__}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {"device": torch.cuda.get_device_name(), "capability": f"sm_{major}{minor}", "driver": _driver()}
    with contextlib.suppress(ImportError):
        from importlib import metadata

        found["triton"] = metadata.version("triton")
    return found


def _driver() -> str:
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return ""


# ---------------------------------------------------------------------------------------------- by a generator


def check_generator(asked: GeneratorAsked) -> None:
    """Raise `UserError` for what can be told without asking it."""
    from foretell.tune.generate.ways import ways_without

    ways_without(asked.without)
    if asked.money is not None and not (asked.price_in or asked.price_out):
        raise UserError("--money limits what tokens cost, and no price is given", "--price-in and --price-out, for a million tokens")
    if min(asked.price_in, asked.price_out, asked.money or 0.0) < 0:
        raise UserError("prices and money are not below zero", "--price-in 3 --price-out 15")
    if _is_url(asked.where) and not asked.model:
        raise UserError("an endpoint serves several models, and none is named", "--model NAME")
    generator_of(asked)


def _is_url(where: str) -> bool:
    return where.lower().startswith(("http:", "https:"))


def generator_of(asked: GeneratorAsked) -> TextGenerator:
    """The endpoint or the command."""
    from foretell.tune.generate.budget import TokenPrices
    from foretell.tune.generate.command import CommandGenerator
    from foretell.tune.generate.endpoint import KEY, HttpEndpoint

    prices = TokenPrices(per_million_in=asked.price_in, per_million_out=asked.price_out)
    if not _is_url(asked.where):
        return CommandGenerator(command=asked.where, prices=prices, seconds=asked.time_limit)
    key = os.environ.get(asked.key_env or KEY, "").strip()
    if asked.key_env and not key:
        raise UserError(f"there is no key in {asked.key_env}", f"export {asked.key_env}=...")
    return HttpEndpoint(url=asked.where, model=asked.model, key=key, prices=prices, seconds=asked.time_limit)


def _generated(
    trials: Trials, asked: GeneratorAsked, minutes: float, compile: bool, folder: Path, progress: Callable[[str], None]
) -> KernelSearch:
    from foretell.tune.generate.budget import SessionBudget, TokenPrices
    from foretell.tune.generate.gym import KernelGym
    from foretell.tune.generate.rounds import KernelSession, head_of
    from foretell.tune.generate.transcript import RecordedGenerator, TranscriptWriter

    options, memory = _session(trials, asked)
    gym = KernelGym(trials, honest=options.ways.gym, audit=options.ways.audit)
    prices = TokenPrices(per_million_in=asked.price_in, per_million_out=asked.price_out)
    budget: SessionBudget = SessionBudget(minutes * SESSION_SHARE, asked.money, prices)
    writer = TranscriptWriter(_free(folder / "transcript.jsonl"), head_of(options, memory, budget))
    try:
        session = KernelSession(options, RecordedGenerator(generator_of(asked), budget, writer), gym, budget, memory, writer, progress).run()
    finally:
        writer.close()
        gym.end()
    if session.fault == "EndpointError" and not session.variants:
        raise UserError(session.ended, "see that it runs, or another --generator")
    if session.best is None or session.interrupted:
        return KernelSearch(task=trials.task.name, text=session.best.text if session.best else "", session=session, interrupted=session.interrupted)
    return _judged(trials, session, compile, progress)


def _judged(trials: Trials, session: SessionAnswer, compile: bool, progress: Callable[[str], None]) -> KernelSearch:
    """The best of a session by all stages, and beside every baseline."""
    from foretell.tune.search.trial import written

    assert session.best is not None
    code = written(session.best.text, trials.task.name)
    try:
        progress("verifying the best")
        verdict = trials.verified(code)
        speed = trials.judged(code, compile=compile) if verdict.accepted else None
    except KeyboardInterrupt:
        return KernelSearch(task=trials.task.name, text=session.best.text, session=session, interrupted=True)
    return KernelSearch(task=trials.task.name, text=session.best.text, session=session, verdict=verdict, speed=speed)


def _session(trials: Trials, asked: GeneratorAsked) -> tuple[SessionOptions, TunerMemory | None]:
    from foretell.trace.store import cache
    from foretell.tune.generate.memory import TunerMemory
    from foretell.tune.generate.rounds import SessionOptions
    from foretell.tune.generate.ways import ways_without

    ways, machine = ways_without(asked.without), _machine()
    names = [machine[name] for name in ("capability", "device") if name in machine][:1] if trials.setting.on_gpu else ["cpu"]
    kind = "-".join([*names, "torch", machine["torch"].split("+")[0]])
    backend = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
    options = SessionOptions(
        task=trials.task.text, ops=tuple(sorted(set(trials.ops))), backend=backend, ways=ways, rounds=asked.rounds, answers=asked.answers,
    )  # fmt: skip
    return options, TunerMemory(kind, cache.folder() / "kernels" / f"memory-{kind}.jsonl") if ways.memory else None


# ---------------------------------------------------------------------------------------------- what is left behind


def _folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path} cannot be made: {error.strerror or error}", "a folder in one that is there") from None
    return folder


def _free(path: Path) -> Path:
    """What was paid for is not written over."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def _written(answer: KernelSearch, folder: Path) -> KernelSearch:
    from foretell.files import write_atomically

    try:
        if answer.text:
            write_atomically(folder / "kernel.py", answer.text)
        write_atomically(folder / "search.json", json.dumps(answer.to_json(), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}", "--out with another folder") from None
    return answer

