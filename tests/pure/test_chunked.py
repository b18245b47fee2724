"""The output layer and the loss in chunks of the tokens: the numbers of the plain loss, the bytes of a real step, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.errors import ModelError
from foretell.plan import file, legal
from foretell.plan.types import Mesh, Plan
from foretell.simulate.memory.replay import peak_live
from foretell.trace import types
from foretell.trace.adapters.nf4 import nf4_dequantize, nf4_quantize
from foretell.trace.load.model import Source
from foretell.trace.recipe import Adapters, Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu
from foretell.trace.record.step import Workload, compute_loss, in_chunks
from tests.further import further

WIDTH, CLASSES, ROWS = 24, 90, 50
STEPS = ("first_step", "steady_step")
WIDE = {"vocab_size": 8192, "layers": 2, "dim": 32, "heads": 4, "context": 64}
"""Logits are the largest tensors of its step."""


class Head(nn.Module):
    """An output layer behind something to train, and what a user may do with logits before the loss."""

    def __init__(self, dtype: torch.dtype, bias: bool = False, change: Callable[[Any], Any] = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Linear(WIDTH, CLASSES, bias, dtype=dtype)
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.head(self.body(x)))


def batch(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, CLASSES, (2, ROWS), generator=generator)
    targets[0, :7] = -100
    return {"x": torch.randn(2, ROWS, WIDTH, generator=generator).to(dtype), "targets": targets}


def gradients(loss: Callable[..., Tensor], chunks: int, model: Head, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    work = Workload(model, batch(dtype), loss)
    found = compute_loss(in_chunks(work, chunks) if chunks > 1 else work)
    (found / 4).backward()
    return found.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def entropy(**how: Any) -> Callable[..., Tensor]:
    return lambda output, batch: F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten(), **how)


LOSSES = {
    "mean": entropy(), "sum": entropy(reduction="sum"), "smoothed": entropy(label_smoothing=0.2),
    "ignored": lambda output, batch: entropy(ignore_index=3)(output, {"targets": batch["targets"].clamp_min(0)}),
    "in its own dtype": lambda output, batch: F.cross_entropy(output.view(-1, CLASSES), batch["targets"].view(-1)),
    "shifted": lambda output, batch: F.cross_entropy(
        output[..., :-1, :].contiguous().view(-1, output.size(-1)).float(), batch["targets"][..., 1:].reshape(-1)),
    "scaled": lambda output, batch: F.cross_entropy((output / 3.0 * 2).reshape(-1, CLASSES).float(), batch["targets"].flatten()),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_the_plain_loss(name: str, dtype: torch.dtype) -> None:
    """100 rows in chunks of 34, 34 and 32: sums over rows are rounded once for each chunk, all else is the same."""
    plain, wanted = gradients(LOSSES[name], 1, Head(dtype, bias=True), dtype)
    loss, found = gradients(LOSSES[name], 3, Head(dtype, bias=True), dtype)
    exact = torch.finfo(torch.float32 if name != "in its own dtype" else dtype).eps
    assert loss.dtype == plain.dtype and float(loss) == pytest.approx(float(plain), rel=4 * exact)
    assert found.keys() == wanted.keys() and len(found) == 4
    for parameter, gradient in wanted.items():
        apart = (found[parameter].double() - gradient.double()).norm() / gradient.double().norm()
        assert found[parameter].dtype == gradient.dtype and apart <= 4 * torch.finfo(dtype).eps, parameter


def test_what_is_not_summed_over_chunks_is_equal_to_the_bit() -> None:
    """Losses of single tokens, gradients of rows, and what is computed from these."""
    found = []
    for chunks in (1, 3):
        model, given = Head(torch.float32), batch(torch.float32)
        given["x"].requires_grad_()
        one = Workload(model, given, LOSSES["mean"])
        compute_loss(in_chunks(one, chunks) if chunks > 1 else one).backward()
        alone = Workload(model, {name: value[:1, 9:10] for name, value in given.items()}, LOSSES["mean"])
        with torch.no_grad():
            single = compute_loss(in_chunks(alone, chunks) if chunks > 1 else alone)
        found.append([single, given["x"].grad, model.body.weight.grad, model.body.bias.grad])
    assert all(map(torch.equal, *found))


def test_a_frozen_output_layer_has_no_gradient_and_no_loss_is_counted_twice() -> None:
    model = Head(torch.float32)
    model.head.weight.requires_grad_(False)
    _, wanted = gradients(LOSSES["mean"], 1, model, torch.float32)
    wanted = {name: one.clone() for name, one in wanted.items()}
    model.zero_grad()
    _, found = gradients(LOSSES["mean"], 4, model, torch.float32)
    assert found.keys() == wanted.keys() == {"body.weight", "body.bias"}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)  # nothing of it is a sum over chunks
    twice = compute_loss(in_chunks(Workload(model, batch(torch.float32), LOSSES["mean"]), 4))
    twice.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice.backward()


def test_nothing_but_ignored_targets_is_no_number_and_has_no_gradient() -> None:
    for chunks in (1, 3):
        model = Head(torch.float32)
        given = {**batch(torch.float32), "targets": torch.full((2, ROWS), -100)}
        work = Workload(model, given, LOSSES["mean"])
        loss = compute_loss(in_chunks(work, chunks) if chunks > 1 else work)
        loss.backward()
        assert math.isnan(loss.item()) and not model.head.weight.grad.any()  # type: ignore[union-attr]


REFUSED: dict[str, tuple[Callable[[Any], Any], Callable[..., Tensor], str]] = {
    "tanh reads them": (torch.tanh, LOSSES["mean"], "tanh read them first"),
    "another output is added": (lambda logits: logits + 1.0, LOSSES["mean"], "add read them first"),
    "read besides": (lambda logits: (logits, logits.argmax(-1)), lambda output, batch: LOSSES["mean"](output[0], batch), "argmax reads its logits"),
    "no cross entropy": (lambda logits: logits, lambda output, batch: output.float().square().mean(), "no cross entropy.*square"),
    "weights": (lambda logits: logits, entropy(weight=torch.ones(CLASSES)), "its classes have weights"),
    "one by one": (lambda logits: logits, lambda output, batch: entropy(reduction="none")(output, batch).mean(), "its reduction is none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_losses_are_refused_with_the_reason(name: str) -> None:
    """And computed as ever where no chunks are asked for."""
    change, loss, why = REFUSED[name]
    work = Workload(Head(torch.float32, change=change), batch(torch.float32), loss)
    assert math.isfinite(float(compute_loss(work)))
    with pytest.raises(ModelError, match=why):
        compute_loss(in_chunks(work, 3))


def test_what_the_output_layer_reads_may_not_change_before_the_loss() -> None:
    class Changing(Head):
        def forward(self, x: Tensor) -> Any:
            hidden = self.body(x).detach()
            logits = self.head(hidden)
            hidden.zero_()
            return logits

    with pytest.raises(ModelError, match="changed in place"):
        compute_loss(in_chunks(Workload(Changing(torch.float32), batch(torch.float32), LOSSES["mean"]), 3))


def test_layers_whose_outputs_are_read_at_once_are_computed_as_ever() -> None:
    """No blocks: the body's outputs are put off too, until the next layer reads them."""
    model = Head(torch.float32, change=lambda logits: logits)
    model.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))  # type: ignore[assignment]
    found = []
    for chunks in (1, 3):
        model.zero_grad()
        gradients(LOSSES["mean"], chunks, model, torch.float32)
        found.append([p.grad.clone() for p in model.body.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *found)) and len(found[0]) == 6


# --------------------------------------------------------------------------- predicted


@pytest.mark.parametrize("how", further(
    [{}, {"precision": "bf16-autocast", "accumulate": 2}, {"adapters": Adapters(rank=4), "base": (("adapted", "nf4"),), "recompute": "full"},
     {"precision": "bf16"}, {"freeze": ("tokens",)}],
    [{"adapters": Adapters(rank=4), "base": (("adapted", "nf4"),), "recompute": "full"}], "the same loss with other weights",
))  # fmt: skip
def test_bytes_are_those_of_a_real_step(how: dict[str, Any]) -> None:
    nf4_dequantize(*nf4_quantize(torch.zeros(64), True), (64,), torch.float32)
    source, recipe = Source(model="gpt-tiny", overrides=WIDE, micro_batch=2), Recipe(**{"precision": "fp32", **how}, loss_chunks=3)
    assert measure_on_cpu(source, recipe)[0] == peak_live(trace_as_cpu(source, recipe), STEPS)


def test_logits_of_one_chunk_are_alive_at_a_time() -> None:
    """Frozen embeddings, so that nothing else is as large: a piece of logits, its logarithms and the gradient of these."""

    def most(chunks: int) -> int:
        trace = capture(lambda: _loaded(), Recipe(precision="fp32", freeze=("tokens",), loss_chunks=chunks))
        alive = highest = 0
        for op in trace.programs["micro_first"].ops:
            alive += sum(trace.storages[n].nbytes for n in op.allocates if trace.storages[n].role == types.LOGITS)
            highest = max(highest, alive)
            alive -= sum(trace.storages[n].nbytes for n in op.frees if trace.storages[n].role == types.LOGITS)
        return highest

    whole = 2 * 64 * 8192 * 4
    assert most(1) >= 3 * whole and most(8) <= 4 * whole // 8


def _loaded() -> Workload:
    from foretell.trace.load.model import load

    return load(Source(model="gpt-tiny", overrides=WIDE, micro_batch=2))


# --------------------------------------------------------------------------- plans


def test_a_plan_keeps_it_and_a_file_says_it() -> None:
    plan = Plan(model={"model": "gpt-tiny"}, hardware="CPU", precision="fp32", loss_chunks=8)
    data = file.to_json(plan)
    assert data["loss_chunks"] == 8 and file.from_json(data) == plan
    assert "loss_chunks" not in file.to_json(plan.with_(loss_chunks=1))
    assert Recipe.from_json(Recipe(loss_chunks=8).to_json()).loss_chunks == 8 and "loss_chunks" not in Recipe().to_json()


@pytest.mark.parametrize(("changes", "why"), [
    ({"loss_chunks": 0}, "not a whole number above 0"), ({"mesh": Mesh(tp=2)}, "mesh.tp is 2"), ({"mesh": Mesh(cp=2)}, "mesh.cp is 2"),
    ({"precision": "fp16-mixed"}, "before the loss is scaled"), ({"compile": "model"}, "compile is model"),
    ({"kernels": {"loss": "compiled"}}, "kernels.loss is compiled"),
])  # fmt: skip
def test_what_does_not_go_with_chunks_is_refused(changes: dict[str, Any], why: str) -> None:
    plan = Plan(**{"model": {"model": "gpt-tiny"}, "hardware": "CPU", "precision": "fp32", "loss_chunks": 4, **changes})
    assert any(one.field == "loss_chunks" and why in one.problem for one in legal.complaints(plan))
    assert not legal.complaints(Plan(model={"model": "gpt-tiny"}, hardware="CPU", loss_chunks=4, compile="blocks", mesh=Mesh(dp_shard=2)))
