"""`foretell tune verify`: a kernel, verified as if it were trying to cheat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.tune.verify.types import Verdict


def verify(
    file: Path | None = typer.Argument(None, metavar="FILE", help="A Python file with a class ModelNew.", show_default=False),
    reference: Path | None = typer.Option(
        None, "--reference", metavar="FILE", show_default=False, help="The task: Model, get_inputs() and get_init_inputs(); default: in FILE."
    ),
    device: str = typer.Option("auto", "--device", metavar="NAME", help="cpu or cuda; on a CPU Triton kernels are interpreted."),
    seed: int | None = typer.Option(None, "--seed", metavar="N", show_default=False, help="Draw the same again; default: nobody knows it."),
    forward_only: bool = typer.Option(False, "--forward-only", help="Do not ask for gradients."),
    no_scan: bool = typer.Option(False, "--no-scan", help="Run it whatever its text looks like."),
    limit: float = typer.Option(60.0, "--limit", min=1.0, metavar="SECONDS", help="Longest time for one answer."),
    bench: bool = typer.Option(False, "--bench", help="Measure it too, beside eager, torch.compile and every --baseline."),
    baseline: list[str] = typer.Option([], "--baseline", metavar="FILE", help="A further kernel to beat; may be repeated."),
    corpus: bool = typer.Option(False, "--corpus", help="Try the shipped kernels instead: every cheat refused, every good one accepted."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Does the kernel in FILE compute what its reference does? Exit 0 accepted, 1 refused, 2 bad input.

    It runs in processes of its own, without network; seeds, inputs, expected values, comparison and clock stay here.
    """
    if corpus:
        return _corpus(device, seed, json=json)
    if file is None:
        raise UserError("no FILE is given", "name a Python file with a class ModelNew, or --corpus")
    if baseline and not bench:
        raise UserError("--baseline is of --bench, which is not given", "add --bench")
    common.runs_code_of(str(file))
    doing = common.Doing(f"verifying {file.name}")

    def work() -> Any:
        from foretell.api.tune import verify_kernel

        return verify_kernel(
            str(file), reference=str(reference) if reference else None, device=device, seed=seed, gradients=not forward_only, scan=not no_scan,
            time_limit=limit, bench=bench, baselines=tuple(baseline), progress=doing.tell,
        )  # fmt: skip

    found = common.call(work, doing)
    if json:
        common.emit_json({"kernel": found.to_json()})
    else:
        common.emit("\n".join([*_lines(found.verdict), *_speed(found.speed)]))
    return common.YES if found.good else common.NO_OR_FAILED


def _lines(verdict: Verdict) -> list[str]:
    rows = [f"  {one.stage:<12} {one.status:<12} {one.text if one.status != 'failed' else ''}".rstrip() for one in verdict.stages]
    if not verdict.accepted:
        return [f"{verdict.candidate} for {verdict.task} on {verdict.device}: REFUSED by {verdict.stage}, {verdict.check}: {verdict.reason}", *rows]
    facts = [f"largest error {verdict.worst_error:.0%} of what is allowed (twice eager's own)", f"{verdict.calls} calls"]
    facts += [f"answers repeat {verdict.determinism}"] if verdict.determinism else []
    without = [] if "network" in verdict.isolation else ["this system gave no namespaces: it was not kept from the network"]
    return [f"{verdict.candidate} for {verdict.task} on {verdict.device}: accepted; {'; '.join(facts)}", *rows, *without]


def _speed(speed: Any) -> list[str]:
    if speed is None:
        return []
    rows = [
        f"  {shape.name}: {shape.candidate_seconds * 1e6:.1f} µs; "
        + ", ".join(f"{name} {seconds * 1e6:.1f} µs" for name, seconds in sorted(shape.baselines.items(), key=lambda pair: pair[1]))
        for shape in speed.shapes
    ]
    word = "faster" if speed.faster else f"NOT faster ({speed.check})"
    return [f"{word}: {speed.reason}", *rows]


# --- the shipped kernels ---------------------------------------------------------------------------------------------


def _corpus(device: str, seed: int | None, *, json: bool) -> int:
    from foretell.api.tune import try_corpus

    rows = []
    for row in try_corpus(device=device, seed=seed):
        rows.append(row)
        if not json:
            mark = "as it must" if row["as_it_must"] else "not here" if row["missing"] else "WRONG"
            told = f"needs {row['missing']}" if row["missing"] else row["check"] or "accepted"
            common.emit(f"{row['group']:<12} {row['kernel']:<20} {mark:<11} {told}")
    wrong = sum(not row["as_it_must"] and not row["missing"] for row in rows)
    cheats = {row["number"] for row in rows if row["number"] and row["as_it_must"]}
    missed = sorted({row["number"] for row in rows if row["number"]} - cheats)
    if json:
        common.emit_json({"corpus": rows})
    else:
        left = f"; not tried here: {', '.join(map(str, missed))}" if missed else ""
        common.emit(f"{len(cheats)} of the 35 known cheats refused for the right reason{left}; {wrong} wrong")
    return common.YES if not wrong else common.NO_OR_FAILED
