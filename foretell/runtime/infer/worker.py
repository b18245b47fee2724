"""A stage's process: builds the model, keeps its stage, and computes what comes until nothing does.

What it is comes as one line of standard input, which is closed when its caller is gone; it says its port, and then that it is ready.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from foretell.checkpoint.pretrained import load_into
from foretell.errors import UserError
from foretell.runtime.infer.links import WAIT_SECONDS, Closed, GlooLink, StageLink, accept, connect, listener
from foretell.runtime.infer.stage import SplitForms, SplitModel, SplitPart, ghosts
from foretell.runtime.process.secure import Forged
from foretell.trace.load.model import Source, load

LOST = 3
"""Exit status of a stage whose neighbours are gone."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the caller's
    told = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what models print is no answer
    place = listener()

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    say({"port": place.getsockname()[1], "process": os.getpid()})
    try:
        part, forms = _built(told, say)
        ports = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_caller, daemon=True).start()
        before, after = _links(told, ports, place)
        say({"linked": True})
        _serve(part, forms, before, after, torch.device(told["device"]))
    except UserError as error:
        say({"refused": [error.problem, error.remedy]})
        os._exit(2)
    except (Closed, Forged) as error:
        sys.stderr.write(f"stage {told['stage']}: {error}\n")
        os._exit(LOST)
    os._exit(0)  # without the handshakes of a process group whose others may be gone


def _built(told: dict[str, Any], say: Any) -> tuple[SplitPart, SplitForms]:
    """This stage, on its device; and what travels, once all have said whether they must see requests."""
    torch.set_num_threads(told["threads"])
    torch.manual_seed(told["seed"])
    device, dtype = torch.device(told["device"]), getattr(torch, told["dtype"])
    workload = load(Source(**told["source"]))
    model = workload.model.to(dtype)
    if told["weights"] is not None:
        load_into(model, Path(told["weights"]))
    split = SplitModel(model.to(device), as_served(workload.batch, dtype, device), told["cuts"])
    part = split.part(told["stage"])
    say({"sees": part.sees_requests()})
    sees = json.loads(sys.stdin.readline())["sees"]
    wants = tuple(any(sees[stage:]) for stage in range(len(sees)))
    forms = SplitForms(inputs=split.forms.inputs, crossing=split.forms.crossing, outputs=split.forms.outputs, wants=wants)
    return part, forms


def as_served(batch: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A batch on a device, its floats as the model's."""

    def moved(leaf: Any) -> Any:
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(moved, batch)


def _links(told: dict[str, Any], ports: dict[str, Any], place: Any) -> tuple[StageLink, StageLink]:
    """To the neighbours: the caller by TCP, stages by what was asked for."""
    stage, count, token = told["stage"], len(told["cuts"]) + 1, bytes.fromhex(told["token"])
    gloo = told["over"] == "gloo" and count > 1
    by_tcp_after = not gloo or stage == count - 1
    after: StageLink | None = connect("127.0.0.1", ports["next"], token, f"link {stage + 1}") if by_tcp_after else None
    before: StageLink | None = accept(place, token, f"link {stage}") if not gloo or stage == 0 else None
    place.close()
    if gloo:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(told["store"], count)
        dist.init_process_group("gloo", store=store, rank=stage, world_size=count, timeout=timedelta(seconds=WAIT_SECONDS))
    return before or GlooLink(stage - 1), after or GlooLink(stage + 1)


def _serve(part: SplitPart, forms: SplitForms, before: StageLink, after: StageLink, device: torch.device) -> None:
    index = part.index
    crosses = len(forms.crossing[index])
    sees = index == 0 or forms.wants[index]
    blank = [] if sees else ghosts(part.split.request)
    while True:
        try:
            message = before.receive(forms.into(index))
        except Closed:
            return
        began = time.perf_counter()
        *content, echo, took = message
        values = [one.to(device) for one in content]
        request = values[crosses:]
        found = part(values[:crosses], request if sees else blank)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took[index] = time.perf_counter() - began
        if part.is_last:
            after.send((*(found if int(echo) else ()), echo, took))
        else:
            after.send((*found, *(request if forms.wants[index + 1] else ()), echo, took))


def _end_with_caller() -> None:
    sys.stdin.read()
    os._exit(LOST)


if __name__ == "__main__":
    main()
