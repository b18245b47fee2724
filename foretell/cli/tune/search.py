"""`foretell tune search`: a faster kernel for a task, from templates or from a language model, verified and measured either way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foretell.cli import common
from foretell.errors import UserError
from foretell.plan.text import shell_word

if TYPE_CHECKING:
    from foretell.api.kernels.search import GeneratorAsked, KernelSearch
    from foretell.tune.generate.rounds import SessionAnswer
    from foretell.tune.search.search import SearchAnswer

ROWS = 8


def search(
    task: Path | None = typer.Argument(
        None, metavar="TASK.py", help="Model, get_inputs() and get_init_inputs(), as KernelBench has them.", show_default=False
    ),
    minutes: float = typer.Option(5.0, "--minutes", help="Budget in minutes."),
    out: Path | None = typer.Option(None, "--out", metavar="DIR", show_default=False, help="Folder for the kernel. [default: TASK.tuned]"),
    generator: str | None = typer.Option(
        None, "--generator", metavar="URL|COMMAND", show_default=False, help="Ask a language model: an OpenAI-compatible endpoint, or a command."
    ),
    model: str = typer.Option("", "--model", metavar="NAME", show_default=False, help="The endpoint's model."),
    key_env: str = typer.Option("", "--key-env", metavar="NAME", show_default=False, help="Variable with its key. [default: FORETELL_GENERATOR_KEY]"),
    money: float | None = typer.Option(None, "--money", show_default=False, help="Budget in money; needs prices."),
    price_in: float = typer.Option(0.0, "--price-in", help="Price of a million tokens that go in."),
    price_out: float = typer.Option(0.0, "--price-out", help="Price of a million tokens that come out."),
    without: list[str] = typer.Option([], "--without", metavar="WAY", help="Leave out strategy, judge, gym, memory, ranked or audit."),
    rounds: int = typer.Option(50, "--rounds", min=1, metavar="N", help="Rounds at most."),
    answers: int = typer.Option(1, "--answers", min=1, max=64, metavar="N", help="Kernels asked for in a round, verified side by side."),
    replay: Path | None = typer.Option(
        None, "--replay", metavar="TRANSCRIPT", show_default=False, help="Go through a recorded session again; asks and runs nothing."
    ),
    curate: list[Path] = typer.Option(
        [], "--curate", metavar="TRANSCRIPT", help="Write the verified kernels of transcripts to --out, each idea once; may be repeated."
    ),
    device: str = typer.Option("auto", "--device", metavar="NAME", help="cpu or cuda."),
    seed: int = typer.Option(0, "--seed", metavar="N", help="Of the order in which configurations are tried."),
    forward_only: bool = typer.Option(False, "--forward-only", help="Time and verify no gradients."),
    no_compile: bool = typer.Option(False, "--no-compile", help="Leave torch.compile out of the baselines."),
    again: bool = typer.Option(False, "--again", help="Search on where an earlier search found a winner."),
    most: int = typer.Option(0, "--most", metavar="N", help="Configurations measured at most; 0: as the budget allows."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Find a faster kernel for the module in TASK.py. Exit 0 found, 1 none is faster, 2 bad input.

    foretell tune search task.py --minutes 5

    Every candidate is verified as `foretell tune verify` does; what was measured is kept, and the same command resumes.
    """
    if replay is not None:
        return _replayed(replay, json=json)
    if curate:
        return _curated(curate, out, json=json)
    if task is None:
        raise UserError("no TASK.py is given", "name a Python file with a class Model and get_inputs(), or --replay or --curate a transcript")
    if not 0 < minutes < 1e5:
        raise UserError(f"--minutes {minutes:g}", "minutes above 0")
    asked = _asked(generator, model, key_env, price_in, price_out, money, without, rounds, answers)
    common.runs_code_of(str(task))
    doing = common.Doing(f"tuning {task.name}")

    def work() -> KernelSearch:
        from foretell.api.kernels.search import search_kernel

        return search_kernel(
            str(task), minutes=minutes, out=None if out is None else str(out), generator=asked, device=device, seed=seed, backward=not forward_only,
            compile=not no_compile, again=again, most=most, progress=doing.tell,
        )  # fmt: skip

    found = common.call(work, doing)
    if json:
        common.emit_json({"kernel": found.to_json()})
    else:
        common.emit("\n".join(lines(found, str(task))))
    return common.INTERRUPTED if found.interrupted else common.YES if found.faster else common.NO_OR_FAILED


def _asked(
    generator: str | None, model: str, key_env: str, price_in: float, price_out: float, money: float | None, without: list[str], rounds: int,
    answers: int,
) -> GeneratorAsked | None:  # fmt: skip
    from foretell.api.kernels.search import GeneratorAsked, check_generator

    if generator is None:
        given = {"--model": model, "--key-env": key_env, "--money": money, "--without": without, "--price-in": price_in, "--price-out": price_out}
        if words := [name for name, value in given.items() if value]:
            raise UserError(f"{words[0]} is of --generator, which is not given", "add --generator URL or COMMAND")
        return None
    asked = GeneratorAsked(
        where=generator, model=model, key_env=key_env, price_in=price_in, price_out=price_out, money=money, without=tuple(without), rounds=rounds,
        answers=answers,
    )  # fmt: skip
    check_generator(asked)
    return asked


# ---------------------------------------------------------------------- what is said


def lines(found: KernelSearch, task: str) -> list[str]:
    text = _of_search(found.search) if found.search is not None else _of_session(found.session) if found.session is not None else []
    if found.interrupted:
        kept = "what was measured is kept, and the same command resumes" if found.search is not None else "what was found is kept in the transcript"
        text.append(f"interrupted: {kept}" + ("; the kernel is not compared with every baseline yet" if found.text else ""))
    text += _verdict(found)
    if found.text:
        path = str(Path(found.out) / "kernel.py")
        text.append(f"Written to {path}.  Next:  foretell tune verify {shell_word(path)} --reference {shell_word(task)}")
    return text


def _verdict(found: KernelSearch) -> list[str]:
    kept = found.search.kept if found.search is not None else None
    if kept is not None and found.verdict is not None and found.verdict.accepted:
        return [f"found on {kept.date} and verified again: {kept.speedup:.3f}× beside {kept.beside}; --again searches on"]
    if found.verdict is not None and not found.verdict.accepted:
        return [f"REFUSED by {found.verdict.stage}, {found.verdict.check}: {found.verdict.reason}"]
    if found.speed is not None:
        word = "faster" if found.speed.faster else f"NOT faster ({found.speed.check})"
        return [f"{word}: {found.speed.reason}"]
    return [] if found.text else ["no kernel was both right and measured"]


def _of_search(found: SearchAnswer) -> list[str]:
    from foretell.tune.search.space import shown

    known = f", {found.resumed} of them before" if found.resumed else ""
    text = [f"{found.task} on {found.device}: {found.template}, {len(found.rows)} of {found.configurations:,} configurations tried{known}"]
    rows = [(config, result) for config, result in found.rows if result.status == "timed"]
    for config, result in rows[:ROWS]:
        more = f"  {result.registers} registers" if result.registers else ""
        text.append(f"  {result.speedup:6.3f}× eager  {result.seconds * 1e6:10.1f} µs  {shown(config)}{more}")
    counts: dict[str, int] = {}
    for _, result in found.rows:
        if result.status != "timed":
            counts[result.status] = counts.get(result.status, 0) + 1
    if counts:
        first = next(result for _, result in found.rows if result.status != "timed")
        text.append(f"  {', '.join(f'{count} {status}' for status, count in counts.items())}; the first: {first.reason[:160]}")
    return [*text, *(f"note: {one}" for one in found.notes)]


def _of_session(found: SessionAnswer) -> list[str]:
    money = f", {found.spent:.4f} spent" if found.spent else ""
    text = [f"{found.asked} kernels asked for in {found.calls} questions, {found.right} right{money}; {found.ended}"]
    for one in sorted(found.variants, key=lambda one: -one.measured.reward)[:ROWS]:
        result = one.measured.result
        told = f"{result.speedup:6.3f}× eager" if one.measured.reward else f"refused by {result.stage}, {result.check}: {result.reason[:120]}"
        text.append(f"  {told}  {one.step}".rstrip())
    return text


# ---------------------------------------------------------------------- transcripts


def _replayed(path: Path, *, json: bool) -> int:
    from foretell.api.kernels.search import replay_session

    found = replay_session(str(path))
    if json:
        common.emit_json({"session": found.to_json()})
    else:
        common.emit("\n".join([f"replayed {path}; nothing was asked or run", *_of_session(found)]))
    return common.YES if found.best is not None else common.NO_OR_FAILED


def _curated(paths: list[Path], out: Path | None, *, json: bool) -> int:
    from foretell.api.kernels import search as kernels

    target = out or Path("kernels.jsonl")
    found = kernels.curate([str(one) for one in paths], str(target))
    if json:
        return common.emit_json({"curated": found})
    left = ", ".join(f"{found[name]} {name}" for name in ("wrong", "slow", "duplicates") if found[name])
    common.emit(f"{found['rows']} of {found['seen']} kernels written to {target}" + (f"; left out: {left}" if left else ""))
    return common.YES if found["rows"] else common.NO_OR_FAILED
