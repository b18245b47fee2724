"""The process that models are judged in: asked for one after another over a pipe, replaced when it dies or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def serve(pipe: Connection, seed: str, ops: int) -> None:
    """Answer `judge` and `shrink` until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="foretell-fuzz-") as name, _silent():
        while True:
            asked = pipe.recv()
            if asked is None:
                return
            what, index, more = asked
            if what == "judge":
                pipe.send(judge(seed, index, ops, Path(name)))
            else:
                pipe.send(reduce(seed, index, ops, Path(name), more, shrink=what == "shrink"))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What libraries print goes nowhere."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def judge(seed: str, index: int, ops: int, folder: Path) -> dict[str, Any]:
    from dataclasses import replace

    from foretell.prove.fuzz import check
    from foretell.prove.fuzz.types import Failure, FuzzVerdict

    try:
        model, run, turn = check.drawn(seed, index, ops, folder)
        return replace(check.judged(model, folder, run=run), redrawn=turn).to_json()
    except Exception as error:
        return FuzzVerdict(index, failure=Failure("fuzzer", f"{type(error).__name__}: {error}"[:2000])).to_json()


def reduce(seed: str, index: int, ops: int, folder: Path, failure: dict[str, Any], *, shrink: bool) -> dict[str, Any]:
    """The model with the failure, made smaller where asked, as the text of a file."""
    from foretell.prove.fuzz import check
    from foretell.prove.fuzz.shrink import shrunk
    from foretell.prove.fuzz.types import Failure

    known = Failure(**failure)
    model, _, _ = check.drawn(seed, index, ops, folder)
    small, trials = shrunk(model, lambda one: check.fails_alike(one, folder, known)) if shrink else (model, 0)
    found = (check.judged(small, folder, only=known.kind).failure if trials else None) or known
    return {"text": check.repro(small, found), "ops": small.ops, "names": list(small.names), "trials": trials, "said": found.said}
