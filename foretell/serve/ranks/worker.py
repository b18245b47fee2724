"""A rank: builds its part of the model, then computes each step it is told, in order, until nobody tells it any."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foretell.errors import UserError
from foretell.serve.ranks.controller import STEP_SECONDS, RankLayout
from foretell.serve.ranks.stage import StageRunner
from foretell.serve.sampling import Sampling, choose
from foretell.simulate.serving.scheduler import Row
from foretell.simulate.serving.scheduler import Sequence as Scheduled

LOST = 3
"""Exit status of a rank that others have left."""


def serve_rank(
    link: connection.Connection, rank: int, layout: RankLayout, built: Callable[[], nn.Module], device: torch.device, pages: int, size: int,
) -> None:  # fmt: skip
    """Until the controller closes the connection. The process group is there already."""
    try:
        try:
            runner = StageRunner(built(), layout, device, pages, size)
        except UserError as error:
            _say(link, {"refused": [error.problem, error.remedy]})
            return
        _say(link, {
            "words": runner.words, "context": runner.context, "device": str(device), "dtype": str(runner.dtype).removeprefix("torch."),
            "weights_bytes": runner.weights_bytes, "kv_bytes": runner.pool.nbytes, "process": os.getpid(),
        })  # fmt: skip
        steps = _Steps(link)
        while (told := steps.next()) is not None:
            tokens = _computed(runner, told)
            if rank == layout.samples:
                _say(link, {"tokens": tokens})
    except Exception as error:
        _say(link, {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]})
        raise


def _say(link: connection.Connection, what: Mapping[str, Any]) -> None:
    try:
        link.send_bytes(json.dumps(what).encode())
    except OSError:
        sys.exit(LOST)


class _Steps:
    """What is told, in order; read by a thread, which sees at once when nobody is there any more."""

    def __init__(self, link: connection.Connection) -> None:
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(link,), daemon=True).start()

    def _read(self, link: connection.Connection) -> None:
        try:
            while True:
                self._told.put(json.loads(link.recv_bytes()))
        except (EOFError, OSError):
            self._told.put(None)

    def next(self) -> Any:
        return self._told.get()


def _computed(runner: StageRunner, told: Mapping[str, Any]) -> list[Any]:
    """Tokens of the rows that sample, where they are chosen here."""
    step = tuple(
        Row(Scheduled(0, start + count + (not samples), 1, pages=pages), start, count) for pages, start, count, samples, _ in told["rows"]
    )  # fmt: skip
    logits = runner.logits(step, [row[4] for row in told["rows"]])
    if not told["asked"] or not runner.part.is_last or runner.part.ranks.coordinate("tp"):
        return []
    asked = [(Sampling(**{**how, "stop_tokens": ()}), place) for how, place in told["asked"]]
    return [[one.id, one.logprob, one.likeliest] for one in choose(logits, asked)]


# ---------------------------------------------------------------------- as a process


def main() -> None:
    """What to serve comes as one line of standard input, which is closed when the controller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the controller's: it finishes what is under way
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    layout, rank = RankLayout(tp=told["tp"], pp=told["pp"]), int(told["rank"])
    link = connection.Client(told["address"], "AF_UNIX", authkey=bytes.fromhex(told["key"]))
    _say(link, {"rank": rank})
    setup = told["setup"]
    on_cuda = setup["device"].startswith("cuda")
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // layout.world))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(layout.world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(told["address"]).parent / "ranks"), layout.world)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=layout.world, timeout=timedelta(seconds=STEP_SECONDS)
    )  # fmt: skip
    from foretell.serve.start import built

    try:
        serve_rank(link, rank, layout, lambda: built(setup), device, setup["pages"], setup["size"])
    except Exception:
        os._exit(LOST)
    os._exit(0)  # without the handshakes of a process group whose others may be gone


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(LOST)


if __name__ == "__main__":
    main()
