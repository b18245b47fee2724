"""Splits of inference run: the answer is the whole model's over both links, and what goes wrong is told at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.errors import UserError
from foretell.runtime.infer.links import Closed, TcpLink, accept, connect, listener
from foretell.runtime.infer.pipeline import SplitPipeline
from foretell.runtime.infer.stage import SplitModel, ghosts, tensors_of
from foretell.runtime.parallel.pipeline.part import BoundaryTensor
from foretell.runtime.process.secure import Forged
from foretell.trace.load.model import Source, load
from foretell.trace.record.step import call_model
from tests.further import further

GPT = Source(model="gpt2", overrides={"layers": 4, "dim": 32, "heads": 4, "vocab_size": 100, "context": 32}, seq=16)
TOKEN = b"t" * 32


def answers(split: SplitPipeline, count: int) -> None:
    """Bit for bit the whole model's, for requests that were never seen."""
    for number in range(count):
        torch.manual_seed(number)
        request = [torch.randint_like(one, 0, 90) if not one.is_floating_point() else torch.randn_like(one) for one in split.request]
        with torch.no_grad():
            whole = tensors_of(call_model(split.whole, split.batch(request)))
        found = split(request)
        assert len(found) == len(whole) and all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))


MODELS = {
    "gpt2": (GPT, ("blocks.1", "blocks.3")), "vit-tiny": (Source(model="vit-tiny"), ("blocks.2",)),
    "resnet-tiny": (Source(model="resnet-tiny"), ("stage2.0", "stage3.0")),
    "llama": (Source(model="llama3-1b", seq=16, overrides={"layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab_size": 100}),
              ("blocks.1", "blocks.2")),
}  # fmt: skip


@pytest.mark.parametrize("name", further(MODELS, ("gpt2", "resnet-tiny", "llama"), "its blocks are in a row, as those of gpt2"))
def test_parts_one_after_the_other_are_the_whole(name: str) -> None:
    """In one process, each part of a copy of its own: tied tables, skip connections, rotary tables that all stages make anew."""
    source, cuts = MODELS[name]
    copies = []
    for _ in range(len(cuts) + 2):
        torch.manual_seed(0)
        workload = load(source)
        copies.append(SplitModel(workload.model, workload.batch, cuts))
    whole, *splits = copies
    parts = [split.part(stage) for stage, split in enumerate(splits)]
    with torch.no_grad():
        wanted = tensors_of(call_model(whole.model, whole.batch(whole.request)))
    values: tuple[torch.Tensor, ...] = ()
    for stage, part in enumerate(parts):
        assert tuple(map(BoundaryTensor.of, values)) == whole.forms.crossing[stage]
        values = part(values, whole.request if part.sees_requests() else ghosts(whole.request))
    assert all(torch.equal(one, other) for one, other in zip(values, wanted, strict=True)), name
    held = [sum(one.numel() for one in split.model.parameters()) for split in splits]
    assert max(held) < sum(one.numel() for one in whole.model.parameters()), "no part holds all"


def test_stages_over_tcp_answer_as_the_whole_model_and_a_lost_one_is_told() -> None:
    with SplitPipeline(GPT, cuts=("blocks.2",), over="tcp") as split:
        answers(split, 3)
        latency, stages = split.latency_seconds(5)
        assert len(stages) == 2 and 0 < sum(stages) <= latency and split.per_second(20) > 0
        with pytest.raises(UserError, match="as the stages were made for"):
            split([torch.zeros(1, 3, dtype=torch.int64)])
        os.kill(split.processes[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(UserError, match="stage 1 is gone: ended by signal 9"):
            answers(split, 20)
        assert time.monotonic() - began < 10
        left = split.processes
    assert not any(Path(f"/proc/{one}").exists() for one in left)


@pytest.mark.slow(reason="more processes; two stages over TCP are tried above, all models in one process")
@pytest.mark.parametrize(("name", "over"), [("gpt2", "tcp"), ("gpt2", "gloo"), ("resnet-tiny", "gloo"), ("vit-tiny", "tcp"), ("llama", "gloo")])
def test_more_stages_over_both_links_answer_as_the_whole(name: str, over: str) -> None:
    source, cuts = MODELS[name]
    with SplitPipeline(source, cuts=cuts, over=over) as split:
        answers(split, 2)


def test_a_stage_that_sees_requests_says_so() -> None:
    """A mask that is made of the tokens is needed by every stage; without it only the first needs them."""

    class Masked(torch.nn.Module):
        def __init__(self, masks: bool) -> None:
            super().__init__()
            self.table, self.one, self.two, self.masks = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), masks

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            found = self.two(self.one(self.table(tokens)))
            return found * (tokens > 3)[..., None] if self.masks else found

    for masks in (False, True):
        batch = (torch.arange(8)[None],)
        split = SplitModel(Masked(masks), batch, ("two",))
        assert split.part(1).sees_requests() is masks


@pytest.mark.parametrize(
    ("more", "told"),
    [({"over": "carrier pigeon"}, "carrier pigeon"), ({"cuts": ("blocks.9",)}, "blocks.9"), ({"devices": ("cpu",)}, "2 stages on cpu"),
     ({"devices": ("cpu", "cuda:7")}, "cuda:7")],
)  # fmt: skip
def test_what_cannot_be_split_is_one_line(more: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        SplitPipeline(GPT, **{"cuts": ("blocks.1",), **more})


# ---------------------------------------------------------------------- a link


@pytest.fixture
def pair() -> Iterator[tuple[TcpLink, TcpLink]]:
    place = listener()
    found: list[TcpLink] = []
    thread = threading.Thread(target=lambda: found.append(accept(place, TOKEN, "link 1")))
    thread.start()
    made = connect("127.0.0.1", place.getsockname()[1], TOKEN, "link 1")
    thread.join()
    place.close()
    yield made, found[0]
    made.close()
    found[0].close()


KINDS: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
    ((2, 3), torch.float32), ((0, 4), torch.float32), ((5,), torch.bfloat16), ((), torch.int64),
)  # fmt: skip
FORMS = tuple(BoundaryTensor(shape, dtype) for shape, dtype in KINDS)


def some() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 3), torch.empty(0, 4), torch.randn(5).bfloat16(), torch.tensor(-7)


def test_tensors_of_any_shape_come_as_they_went(pair: tuple[TcpLink, TcpLink]) -> None:
    one, other = pair
    for _ in range(3):
        sent = some()
        one.send(sent)
        came = other.receive(FORMS)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(sent, came, strict=True))
    one.close()
    with pytest.raises(Closed):
        other.receive(FORMS)


@pytest.mark.parametrize("kind", ["changed", "again", "other token"])
def test_what_is_not_of_the_run_is_refused(kind: str, pair: tuple[TcpLink, TcpLink]) -> None:
    one, other = pair
    recorded: list[bytes] = []

    class Noted:
        def sendall(self, content: bytes) -> None:
            recorded.append(content)

    real, one.socket = one.socket, Noted()  # type: ignore[assignment]
    if kind == "other token":
        one.token = b"x" * 32
    one.send(some())
    frame, one.socket = b"".join(recorded), real
    if kind == "changed":
        frame = frame[:-1] + bytes([frame[-1] ^ 1])
    real.sendall(frame)
    if kind == "again":
        other.receive(FORMS)
        real.sendall(frame)
    with pytest.raises(Forged):
        other.receive(FORMS)


def test_who_does_not_know_the_token_is_turned_away() -> None:
    place = listener()
    found: list[TcpLink] = []
    thread = threading.Thread(target=lambda: found.append(accept(place, TOKEN, "link 1")))
    thread.start()
    port = place.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(1) == b""
    made = connect("127.0.0.1", port, TOKEN, "link 1")
    thread.join(10)
    assert found
    for one in (place, made, *found):
        one.close()
