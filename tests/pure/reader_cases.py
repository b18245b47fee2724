"""More things that are read: what supervised, joined and adapted runs leave, and what ranks, hubs and servers say to each other.

For `test_fuzz_readers`: `build` writes one good file of each kind, `CASES` says how it is spoiled and what reads it. Words between
processes are files here, too: what was said, which is spoiled and said again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from foretell.checkpoint import peft_files
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Adapters, Plan, Sync
from foretell.report import goodput
from foretell.runtime.chaos.campaign import ChaosTrial, begun
from foretell.runtime.chaos.remains import Remains, kept_remains
from foretell.runtime.chaos.table import render
from foretell.runtime.detect import history, layout, records
from foretell.runtime.detect.ring import Ring
from foretell.runtime.parallel.sync.frames import Gone, HubChannel
from foretell.runtime.parallel.sync.hub import Hub
from foretell.runtime.process import launch, secure, watch
from foretell.runtime.process.supervise.notices import look_of
from tests.pure import mutations as spoil

TOKEN = "7" * 64
IDENTITY = {"plan": "a", "model_file": "", "steps": 60, "save_every": 5, "words": ["--device", "cpu"]}
Spoil = Callable[[bytes, random.Random], bytes]


class Case(NamedTuple):
    name: str
    spoils: str
    how: Spoil
    words: tuple[str, ...] = ()
    call: Callable[[Path], Any] | None = None


# ---------------------------------------------------------------- good files


def build(at: Path, plan: Plan) -> None:
    """`plan` has its predictions; `at` is there."""
    plans.write(plan.with_(sync=Sync(every=20, format="int8"), mesh=replace(plan.mesh, dp_shard=1, dp_replicate=2)), at / "sync.json")
    adapted = plan.with_(adapters=Adapters(rank=4, alpha=8.0, kind="dora", targets=("*.mlp.*",)), base={"": "nf4", "blocks.0": "bf16"})
    plans.write(adapted, at / "adapted.json")
    (at / "failing").mkdir()
    rows: list[dict[str, Any]] = [{"event": "start", "step": 0, "time": 1.0}]
    rows += [{"event": "step", "step": step, "seconds": 0.1, "loss": 0.5} for step in range(1, 61)]
    rows += [{"event": "save", "step": step, "seconds": 0.3, "stall_seconds": 0.1, "bytes": 100} for step in (20, 40, 60)]
    _lines(at / "failing" / "log.jsonl", rows)
    faults = [{"event": "fault", "kind": "killed", "ranks": [0], "words": "w", "step": 5, "checkpoint": 3},
              {"event": "restarted", "step": 4, "seconds": 1.5, "restart": 1}]  # fmt: skip
    _lines(at / "failing" / "faults.jsonl", faults)
    (at / "failing" / "settings.json").write_text(json.dumps({"steps": 60, "mtbf": 60.0}))
    (at / "chaos").mkdir()
    trial = ChaosTrial(fault="kill", ranks=2, seed=0, step=9, good=True, losses=True, files=True, data=True, seconds=1.5, whole_seconds=9.0)
    _lines(at / "chaos" / "trials.jsonl", [trial.to_json(), replace(trial, fault="hang", good=False, problem="exit status 1").to_json()])
    (at / "chaos" / "chaos.json").write_text(json.dumps(IDENTITY))
    left = Remains(losses={"1": 0.5}, times={}, files={"rank-00000.safetensors": 7}, data={"seed": 0, "epoch": 0, "position": 8})
    (at / "chaos" / "twin.json").write_text(json.dumps(left.__dict__))
    _rings(at / "rings")
    _adapter(at / "adapter")
    _words(at)


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rings(run: Path) -> None:
    (run / layout.FOLDER).mkdir(parents=True)
    for rank in range(2):
        header = {"format": layout.FORMAT, "rank": rank, "world": 2, "host": "h", "device": "cpu", "pid": 1, "role": "pp0", "session": "s"}
        ring = Ring(run / layout.FOLDER / layout.file_name(rank), header)
        ring.name({"group": 1, "key": "0", "name": "dp", "ranks": [0, 1]})
        assert ring.memory is not None
        for number in range(1, 40):
            place = layout.RECORDS_AT + layout.ROW_BYTES * number
            layout.RECORD.pack_into(ring.memory, place, number, number, 10 * number, 10 * number + 1, 10 * number + 5, 64, 1, 1, 1, 1, 1, 2, 0, -1)
            layout.STEP.pack_into(ring.memory, layout.STEPS_AT + layout.ROW_BYTES * number, number, number, 10**9 * number, 10**9, 10**8, 0, 0, 0)


def _adapter(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "lora_dropout": 0.0, "bias": "none", "task_type": None}
    (folder / peft_files.CONFIG).write_text(json.dumps(config))
    name = "base_model.model.layers.0.q_proj.lora_"
    save_file({f"{name}A.weight": torch.ones(2, 4), f"{name}B.weight": torch.ones(4, 2)}, folder / peft_files.WEIGHTS)


REPORT = {"beat": 3, "kind": "step", "seconds": 0.5, "same_seconds": 0.5, "phase": "step", "step": 7, "steps": 7, "step_seconds": 0.1,
          "recovered_seconds": 0.0, "collectives": 12, "where": "train.py:3 in forward",
          "position": {"waits": None, "seen": {}, "groups": {}}}  # fmt: skip


def _words(at: Path) -> None:
    """What was said, as bytes."""
    (at / "report.line").write_bytes(json.dumps(REPORT).encode())
    with mock.patch.dict(os.environ, {launch.TOKEN: TOKEN}):
        (at / "signed").write_bytes(secure.seal(json.dumps([1, {"a": 2.5}]).encode(), "votes 3 0"))
        (at / "verdict").write_text(watch._verdict(watch.RankMessage(why="a rank went", ends=(1,))))
    (at / "join.json").write_text(json.dumps([{"elements": 256}, {"round": 0, "hash": 1}]))
    (at / "frames").write_bytes(_said(lambda channel: channel.send("give", b"abcd", round=1, hash=2)))
    (at / "answer.http").write_bytes(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n\r\nTERMINATE")


class _Drawn(HubChannel):
    """A channel whose name is known, so that what was said on one can be said on another."""

    def __init__(self, link: socket.socket, side: str) -> None:
        self.link, self.side, self._sent, self._got, self._nonce = link, side, 0, 0, b"n" * 16


def _said(by: Callable[[HubChannel], None]) -> bytes:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        by(_Drawn(mine, "peer"))
        return theirs.recv(1 << 16)


# ---------------------------------------------------------------- readers


def plain(*known: type[BaseException]) -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(*known)


def read_frames(at: Path) -> None:
    """With and without a token: then a header that was changed is read."""
    mine, theirs = socket.socketpair()
    with mine, theirs, plain(secure.Forged, Gone):
        theirs.sendall((at / "frames").read_bytes())
        theirs.shutdown(socket.SHUT_WR)
        found = _Drawn(mine, "hub").receive(1 << 20)
        assert len(found.content) <= 1 << 20


def read_report(at: Path) -> None:
    text = (at / "report.line").read_bytes()
    watch._report(text)
    outlook = launch._Outlook(1, launch.Limits.usual(60.0), lambda _: None, lambda *_: None, lambda: None)
    pipe = outlook.pipe(0)
    try:
        os.write(pipe, text[: 1 << 15] + b"\n")
        outlook.listen(0)
    finally:
        os.close(pipe)
        outlook.close()


def read_signed(at: Path) -> None:
    """What was changed on its way is not read at all."""
    content = (at / "signed").read_bytes()
    with mock.patch.dict(os.environ, {launch.TOKEN: TOKEN}):
        good = secure.seal(json.dumps([1, {"a": 2.5}]).encode(), "votes 3 0")
        try:
            assert secure.unseal(content, "votes 3 0") and content == good, "a forged message was taken"
        except secure.Forged:
            assert content != good
        with plain(secure.Forged):
            secure.unseal(content, "votes 4 0")
            raise AssertionError("a message was played again elsewhere")


def read_verdict(at: Path) -> None:
    content = (at / "verdict").read_bytes()
    for token in (TOKEN, ""):
        with mock.patch.dict(os.environ, {launch.TOKEN: token}):
            watch._said(content)


def read_joins(at: Path) -> None:
    """A guest that says something odd is sent away, and the hub serves the next."""
    try:
        first, second = json.loads((at / "join.json").read_bytes())
        first, second = {str(key): value for key, value in first.items()}, {str(key): value for key, value in second.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return
    broken: list[str] = []
    hub = Hub(sync=Sync(every=2, format="fp32"), grace_seconds=0.1)
    before, threading.excepthook = threading.excepthook, lambda args: broken.append(f"{args.exc_type.__name__}: {args.exc_value}")
    try:
        address = hub.start()
        for said in (first, {"elements": 256}):
            with socket.create_connection(address, timeout=10) as link, plain(secure.Forged, Gone, TypeError, ValueError):
                link.settimeout(2.0 if said is first else 10.0)
                channel = HubChannel(link, "peer", opens=False)
                channel.send("join", **{key: value for key, value in said.items() if key not in ("kind", "bytes", "digest", "content", "self")})
                answer = channel.receive(1 << 20)
                if answer.kind == "seed":
                    channel.send("seed", bytes(4 * 256))
                    answer = channel.receive(1 << 20)
                if said is first:
                    channel.send("give", bytes(4 * 256), **{key: second[key] for key in ("round", "hash") if key in second})
                else:
                    assert answer.kind in ("state", "refused"), answer.kind
    finally:
        hub.close()
        threading.excepthook = before
    assert not broken, broken


def read_answer(at: Path) -> None:
    """A server that answers something odd says nothing, or one short line."""
    content = (at / "answer.http").read_bytes()
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with plain(OSError):
            link, _ = server.accept()
            with link:
                link.recv(4096)
                link.sendall(content)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with server, plain(Exception):  # as `Notices` has it
        said = look_of(f"http://127.0.0.1:{server.getsockname()[1]}/notice")()
        if len(said) > 160 or "\n" in said:
            raise SystemExit(f"a notice of {len(said)} characters")
    thread.join(5)


def read_adapter(at: Path) -> None:
    peft_files.read_adapter(at / "adapter")


def read_rings(at: Path) -> None:
    history.read_history(at / "rings")
    history.last_hang(at / "rings")
    for path in sorted((at / "rings" / layout.FOLDER).glob("*.ring")):
        with plain(UserError, ValueError, OSError):
            records.read_ring(path)


CASES = [
    *(Case(f"{word} {name}", name, spoil.json_spoiled, (word, f"{{}}/{name}", *more)) for name in ("sync.json", "adapted.json")
      for word, more in (("show", ()), ("report", ("--out", "{}/page.html")))),
    Case("goodput, log.jsonl", "failing/log.jsonl", spoil.lines_spoiled, call=lambda at: goodput.told_of(at / "failing")),
    Case("goodput, faults.jsonl", "failing/faults.jsonl", spoil.lines_spoiled, call=lambda at: goodput.told_of(at / "failing")),
    Case("goodput, settings.json", "failing/settings.json", spoil.json_spoiled, call=lambda at: goodput.told_of(at / "failing")),
    Case("chaos, trials.jsonl", "chaos/trials.jsonl", spoil.lines_spoiled, call=lambda at: render(begun(at / "chaos", IDENTITY))),
    Case("chaos, chaos.json", "chaos/chaos.json", spoil.json_spoiled, call=lambda at: begun(at / "chaos", IDENTITY)),
    Case("chaos, twin.json", "chaos/twin.json", spoil.json_spoiled, call=lambda at: kept_remains(at / "chaos" / "twin.json")),
    Case("rings", f"rings/{layout.FOLDER}/{layout.file_name(1)}", spoil.bytes_spoiled, call=read_rings),
    Case("adapter config", f"adapter/{peft_files.CONFIG}", spoil.json_spoiled, call=read_adapter),
    Case("adapter weights", f"adapter/{peft_files.WEIGHTS}", spoil.bytes_spoiled, call=read_adapter),
    Case("rank report", "report.line", spoil.json_spoiled, call=read_report),
    Case("signed message", "signed", spoil.bytes_spoiled, call=read_signed),
    Case("verdict", "verdict", spoil.bytes_spoiled, call=read_verdict),
    Case("hub frames", "frames", spoil.bytes_spoiled, call=read_frames),
    Case("hub guests", "join.json", spoil.json_spoiled, call=read_joins),
    Case("notice server", "answer.http", spoil.bytes_spoiled, call=read_answer),
]  # fmt: skip
