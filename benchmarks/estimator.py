"""What PyTorch's own `RuntimeEstimator` says a step takes on an H200, beside the rows of results/time.jsonl.

    python benchmarks/estimator.py             every eager row, in a child process each; no GPU needed
    python benchmarks/estimator.py --mended    CUDA's ops, one fault mended (below); prints, writes nothing

A row gets `runtime_estimator_seconds`, or `runtime_estimator_error` with the reason. Nothing else in it changes.

The estimator (private, `torch.distributed._tools`, mode operator-level-cost-model) adds up max(FLOPs / peak, bytes /
bandwidth) over the ops of a step on fake tensors: forward, backward, optimizer, after a first step that makes the
optimizer's state. Without a GPU to ask, three of its lookups are replaced:

- `get_device_tflops`: PyTorch's table of devices has no H200, so triton's formula would answer: 132 SMs x 4 x 1980 MHz
  (highest SM clock, read from an H200) x 512 (16-bit) or 32 (fp32: TF32 is off by default) multiply-adds. The caller
  takes the answer as 1e15 multiply-adds a second, 0.535 (1,071 TFLOP/s) and 0.033 (67 TFLOP/s), and 75 % of that.
- `get_gpu_dram_gbps`: 4,800 GB/s, the datasheet's figure (assumed: the memory clock in triton's formula was not read).
- `torch.cuda.is_available`: true where the estimator asserts it, and only there.

Backward on fake CUDA tensors fails without a GPU, so the tensors are fake CPU ones and the ops are the CPU's. They
differ from CUDA's above all in attention: there is no FLOP formula for the CPU's, and with dropout it is done in parts.
--mended makes CUDA's choices from foretell's table. There the estimator refuses attention in 16 bits, because its
results have two float dtypes; that is mended by taking the first. Grouped heads it refuses all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import runtime_estimator as theirs
from torch.utils import _runtime_estimation as rates

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


def peak(dtype: torch.dtype) -> float:
    """What `get_device_tflops` returns on an H200: 1e15 multiply-adds a second, despite its name."""
    return 132 * 4 * 1980 * {torch.float16: 512, torch.bfloat16: 512, torch.float32: 32}[dtype] * 1e-9


@contextlib.contextmanager
def as_on_an_h200(mended: bool) -> Any:
    """Answer the estimator's questions about the device."""
    roofline, compute = theirs.RuntimeEstimator._roofline_estimate, theirs.get_compute_time

    def with_a_gpu(*args: Any) -> Any:
        with mock.patch.object(torch.cuda, "is_available", functools.partial(bool, 1)):
            return roofline(*args)

    def first_dtype(packet: Any, args: Any, kwargs: Any, out: Any, dtypes: Any) -> Any:
        return compute(packet, args, kwargs, out, {out[0].dtype} if mended and len(dtypes) > 1 else dtypes)

    with (
        mock.patch.object(rates, "get_device_tflops", peak),
        mock.patch.object(rates, "get_gpu_dram_gbps", functools.partial(int, 4800)),
        mock.patch.object(theirs, "get_compute_time", first_dtype),
        mock.patch.object(theirs.RuntimeEstimator, "_roofline_estimate", with_a_gpu),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield theirs.RuntimeEstimator()


def estimate(config: dict[str, Any], mended: bool) -> dict[str, Any]:
    """Seconds of the second step of a configuration."""
    from memory import parts

    from foretell.trace.cuda.select import cuda_choices, real_masks
    from foretell.trace.load.model import load
    from foretell.trace.record.capture import no_initialisation
    from foretell.trace.record.recorder import Recorder
    from foretell.trace.record.step import Step

    source, recipe = parts(config)
    recorder = Recorder() if mended else None
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(recorder or FakeTensorMode())
        enter(cuda_choices(recorder, (9, 0)) if recorder else contextlib.nullcontext())
        with no_initialisation():
            step = Step(load(source), recipe, device_type="cpu", observer=recorder)
        step.create_optimizer()
        for context in (real_masks(recorder), recorder.modules(step.model), recorder.program("step")) if recorder else ():
            enter(context)
        estimator = enter(as_on_an_h200(mended))
        for seen in (contextlib.nullcontext(), estimator("operator-level-cost-model")):
            with seen:
                for _ in range(recipe.accumulate):
                    step.micro_batch()
                step.update()
                step.zero_grad()
    return {"seconds": estimator.total_runtime / 1e3}


def with_answers(path: Path, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as the file holds them now, with these answers."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for row in rows:
        for what in ("seconds", "error") if row["key"] in found else ():
            row.pop(f"runtime_estimator_{what}", None)
        row |= {f"runtime_estimator_{what}": value for what, value in found.get(row["key"], {}).items()}
    return rows


def summary(rows: list[dict[str, Any]]) -> None:
    times = runpy.run_path(str(HERE / "time.py"))  # by path: its name is the standard library's
    rows = [row for row in rows if "seconds" in row["measured"] and row.get("runtime_estimator_seconds")]
    for name, host in (("device-bound", False), ("host-bound", True)):
        chosen = [row for row in rows if times["host_bound"](row) == host]
        times["_line"](name, chosen, lambda row: row["runtime_estimator_seconds"] / row["measured"]["seconds"])


def main() -> None:
    import cases
    import memory

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "time.jsonl")
    parser.add_argument("--mended", action="store_true")
    options = parser.parse_args()
    os.nice(10)
    warnings.simplefilter("ignore")
    cases.warm_up()
    found: dict[str, dict[str, Any]] = {}
    for row in with_answers(options.out, {}):
        if row["config"]["mode"] == "eager":
            answer = found[row["key"]] = memory.in_child(estimate, row["config"], options.mended, timeout=120)
            print(f"{row['name'][:64]:64s} {row['measured'].get('seconds')} s measured, estimated {answer}", flush=True)
    rows = with_answers(options.out, found)
    if not options.mended:
        aside = options.out.with_suffix(f".{os.getpid()}")
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
        aside.replace(options.out)
    summary(rows)


if __name__ == "__main__":
    main()
