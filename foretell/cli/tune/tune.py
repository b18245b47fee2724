"""`foretell tune`: what a step could gain from better kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.cli.fit.fit import check_step
from foretell.cli.options import taking
from foretell.options.fit import StepOptions

if TYPE_CHECKING:
    from foretell.tune.rank import OpGroup, Ranking


@taking(StepOptions)
def tune(
    model: str = typer.Argument(..., metavar="MODEL", help="As for `fit`: a zoo name, hf:TYPE, timm:NAME or file.py:function."),
    on: str = typer.Option(..., "--on", metavar="HW", show_default=False, help="H100, H100:8, 2x8xH100, auto (this machine) or cluster.toml."),
    *,
    micro_batch: int | None = typer.Option(None, metavar="N", help="Samples in one forward and backward, on each device; default: as `fit`."),
    seq: int | None = typer.Option(None, metavar="N", help="Tokens per sample; default: the model's usual."),
    top: int = typer.Option(15, "--top", min=1, metavar="N", help="Rows to print."),
    options: dict[str, Any],
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Rank the ops of a step of MODEL on HW by what a better kernel could gain at most: its bytes moved once, at full bandwidth."""
    options |= {"micro_batch": micro_batch, "seq": seq}
    check_step(model, on, options)

    def work() -> Ranking:
        from foretell.api.tune import rank

        return rank(model, hardware=on, **options)

    found = common.call(work, f"ranking {model}")
    if json:
        return common.emit_json({"model": model, "ranking": found.to_json()})
    common.emit("\n".join(_lines(model, on, found, top)))
    return common.YES


def _lines(model: str, on: str, found: Ranking, top: int) -> list[str]:
    from foretell.units import human_seconds

    step = found.step_seconds
    head = [
        f"{model} on {on}: a step of {human_seconds(step)}, predicted; {found.products_seconds / step:.0%} in matmul, attention and convolution",
        f"{'gains at most':<15}{'takes':>10}{'floor':>10}  {'runs':>5}  ops",
    ]
    rows = [_row(one, step) for one in found.candidates[:top]]
    if not rows:
        return [head[0], "no other op could shorten the step by half a percent"]
    below = [f"all of them together: at most {found.speedup:.2f}x faster; {found.left_out} groups have less to gain"]
    if found.host_seconds > 0.1 * step:
        below.append(f"the device waits {human_seconds(found.host_seconds)} for the CPU: --compile or CUDA graphs come before kernels")
    return [*head, *rows, *below]


def _row(one: OpGroup, step: float) -> str:
    from foretell.units import human_seconds

    ops = " ".join(one.ops[:6]) + (f" and {len(one.ops) - 6} more" if len(one.ops) > 6 else "")
    gain = f"{one.gain_seconds / step:6.1%}"
    return f"{gain:<15}{human_seconds(one.seconds):>10}{human_seconds(one.floor_seconds):>10}  {one.runs:>5}  {one.module} {one.phase}: {ops}"
