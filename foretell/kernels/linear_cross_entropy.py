"""Output layer and cross entropy together, without the logits.

    chunk of rows ─► product ─► gradient in the place of the logits ─► product into dx
                                            │                      └─► product added to dweight

Forward makes the gradients as it goes, for a loss of gradient 1; backward multiplies them, and reads them only where that gradient is
not 1. With `reduction="none"`, and in fp16, whose small gradients would vanish before a scaled loss reaches them, backward computes the
logits again instead: four products instead of three, and nothing but two numbers a row is kept.

dweight is added up in the weight's own format over few chunks (`MOST_ROUNDINGS`), in float32 over more. A target outside the words that
is not `ignore_index` makes the loss NaN on a GPU, and an error on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from foretell.kernels.kernel import Shape, ShapeBucket, TrainingKernel, define, differentiate, wider

REDUCTIONS = ("mean", "sum", "none")
AUTO, OWN, WIDE = SUMS = ("auto", "weight", "float32")
"""The format a weight's gradient is added up in: by the number of chunks, always the weight's, always float32."""
MOST_ROUNDINGS = 8
"""Chunks up to which a weight's gradient in 16 bits is added up in 16 bits: its error then stays within twice eager's, which rounds once.
At 16 chunks it was up to 2.5 times, at 22 up to 2.9, at 32 up to 3.4."""
TILE = 128
"""Rows of a chunk are a multiple: those of a tile of a product."""
ALIGNED = 64
"""Rows of logits are padded to multiples of so many elements, so that all is read and written by 16 bytes, whatever the number of words."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What is computed of the logits."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    """Times the square of the log of a row's sum of exponentials, added to its loss."""
    softcap: float = 0.0
    """Logits become cap · tanh(logits / cap); 0: as they are."""
    reduction: str = "mean"


# ---------------------------------------------------------------- in plain torch


def reference(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **settings: Any) -> Tensor:
    how, target = LossSettings(**settings), target.flatten()
    logits = F.linear(x.flatten(0, -2), weight, bias)
    logits = logits.to(wider(logits.dtype))
    if how.softcap:
        logits = how.softcap * torch.tanh(logits / how.softcap)
    loss = F.cross_entropy(logits, target, ignore_index=how.ignore_index, label_smoothing=how.label_smoothing, reduction="none")
    counted = target != how.ignore_index
    if how.z_loss:
        loss = loss + how.z_loss * torch.where(counted, torch.logsumexp(logits, -1).square(), 0.0)
    if how.reduction == "none":
        return loss
    return loss.sum() / counted.sum() if how.reduction == "mean" else loss.sum()


def plain_gradient_(
    logits: Tensor, words: int, target: Tensor, factor: Tensor, known: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses of rows, the largest of each and the log of its sum beside it; the gradient in the place of the logits, times `factor`.
    Columns beyond `words` are nobody's."""
    logits, counted = logits[:, :words], target != ignore_index
    z = logits.to(wider(logits.dtype))
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    if known is None:
        most = torch.where(z.amax(-1) == float("-inf"), 0.0, z.amax(-1)) if words else z.sum(-1)
        known = torch.stack([most, (z - most.unsqueeze(-1)).exp().sum(-1).log()], -1)
    most, log = known.unbind(-1)
    place = torch.where(counted, target, 0).unsqueeze(-1)
    chosen = z.gather(-1, place).squeeze(-1)
    loss = log - (1 - label_smoothing) * (chosen - most) + z_loss * (most + log).square()
    if label_smoothing:
        loss = loss - label_smoothing * (z.mean(-1) - most)
    if gradient:
        found = ((z - most.unsqueeze(-1)) - log.unsqueeze(-1)).exp() * (1 + 2 * z_loss * (most + log)).unsqueeze(-1) - label_smoothing / words
        found.scatter_add_(-1, place, torch.full_like(place, label_smoothing - 1, dtype=z.dtype))
        if softcap:
            found *= 1 - (z / softcap).square()
        logits.copy_(torch.where(counted.unsqueeze(-1), found * factor.reshape(-1, 1), 0.0))
    return torch.where(counted, loss, 0.0), torch.where(counted.unsqueeze(-1), known, 0.0)


def _plain_scale_(x: Tensor, by: Tensor) -> None:
    if float(by) != 1.0:
        x.mul_(by)


def _rows_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=wider(logits.dtype)), logits.new_empty(len(logits), 2, dtype=wider(logits.dtype))


_logits_gradient_ = define(
    "logits_gradient_",
    "(Tensor(a!) logits, int words, Tensor target, Tensor factor, Tensor? known, int ignore_index, float label_smoothing, float z_loss, float softcap, "
    "bool gradient) -> (Tensor, Tensor)",
    plain=plain_gradient_, triton="cross_entropy.logits_gradient_", fake=lambda logits, *_: _rows_of(logits),
)  # fmt: skip
_scale_ = define(
    "scale_", "(Tensor(a!) x, Tensor by) -> ()", plain=_plain_scale_, triton="cross_entropy.scale_", fake=lambda x, by: None,
)  # fmt: skip


# ---------------------------------------------------------------- chunks


def padded(words: int) -> int:
    return -(-words // ALIGNED) * ALIGNED


def chunk_rows(rows: int, chunks: int) -> int:
    """Rows of each of so many chunks but the last: whole tiles."""
    size = -(-rows // max(1, chunks))
    return max(1, min(rows, -(-size // TILE) * TILE) if size > TILE else size)


def sum_dtype(weight: torch.dtype, chunks: int, sums: str = AUTO) -> torch.dtype:
    """The format a weight's gradient is added up in."""
    return weight if sums == OWN or (sums == AUTO and chunks <= MOST_ROUNDINGS) else wider(weight)


class _Head:
    """One call: what is asked of it, and the memory it works in."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: LossSettings, chunks: int, sums: str, streams: int) -> None:
        self.x, self.target, self.how, self.sums, self.streams = x, target, how, sums, streams
        self.weight_dtype, self.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        self.weight, self.bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        self.size = chunk_rows(len(x), chunks)
        self.logits = x.new_empty(self.size, padded(len(weight)))
        self.dx = self.dweight = self.dbias = None

    def pieces(self) -> Iterator[slice]:
        return (slice(start, start + self.size) for start in range(0, len(self.x), self.size))

    def want(self, of_x: bool, of_weight: bool, of_bias: bool) -> None:
        words = len(self.weight)
        self.dx = torch.empty_like(self.x, memory_format=torch.contiguous_format) if of_x else None
        if of_weight:
            kind = sum_dtype(self.weight_dtype, -(-len(self.x) // self.size), self.sums)
            make = torch.empty if len(self.x) else torch.zeros
            self.dweight = make(words, self.x.shape[1], dtype=kind, device=self.x.device)
        if of_bias and self.bias_dtype is not None:
            self.dbias = torch.zeros(words, dtype=wider(self.bias_dtype), device=self.x.device)

    def chunk(self, piece: slice, factor: Tensor, known: Tensor | None, gradient: bool) -> tuple[Tensor, Tensor]:
        """Losses and sums of some rows; the gradient of their logits becomes theirs, and a part of the weight's."""
        rows, how = self.x[piece], self.how
        whole = self.logits[: len(rows)]
        logits = whole[:, : len(self.weight)]
        if self.bias is None:
            torch.mm(rows, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=logits)
        found: tuple[Tensor, Tensor] = _logits_gradient_(
            whole, len(self.weight), self.target[piece], factor if factor.dim() == 0 else factor[piece], None if known is None else known[piece],
            how.ignore_index, how.label_smoothing, how.z_loss, how.softcap, gradient,
        )  # fmt: skip
        with _beside(self.x.device, self.streams > 1 and self.dx is not None and self.dweight is not None) as aside:
            if self.dx is not None:
                with aside:
                    torch.mm(logits, self.weight, out=self.dx[piece])
            if self.dweight is not None:
                _add_product(self.dweight, logits.t(), rows, first=not piece.start)
            if self.dbias is not None:
                self.dbias += logits.sum(0, dtype=self.dbias.dtype)
        return found

    def made(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients; what was not wanted is empty."""
        self.logits = none = self.x.new_empty(0)
        return (
            none if self.dx is None else self.dx, none.clone() if self.dweight is None else self.dweight.to(self.weight_dtype),
            none.clone() if self.dbias is None else self.dbias.to(self.bias_dtype),
        )  # fmt: skip


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """total += left · right, rounded once; the first one is written."""
    if total.dtype == left.dtype:
        torch.mm(left, right, out=total) if first else total.addmm_(left, right)
    elif total.is_cuda:
        if first:
            torch.ops.aten.mm.dtype_out(left, right, total.dtype, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        wide = (left.to(total.dtype), right.to(total.dtype))
        torch.mm(*wide, out=total) if first else total.addmm_(*wide)


@contextmanager
def _beside(device: torch.device, on: bool) -> Iterator[AbstractContextManager[Any]]:
    """Around two products: the first may run on a stream of its own, and has ended for whoever comes after."""
    if not on or device.type != "cuda":
        yield nullcontext()
        return
    here = torch.cuda.current_stream(device)
    side = _SIDE.setdefault(device.index or 0, torch.cuda.Stream(device))
    side.wait_stream(here)
    yield torch.cuda.stream(side)
    here.wait_stream(side)


_SIDE: dict[int, Any] = {}


def _factor(x: Tensor, target: Tensor, how: LossSettings) -> Tensor:
    """What the loss of a row counts for: one share of the mean, or itself."""
    one = torch.ones((), dtype=wider(x.dtype), device=x.device)
    return one / (target != how.ignore_index).sum() if how.reduction == "mean" else one


# ---------------------------------------------------------------- ops


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    reduction: str, chunks: int, sum_in: str, of_x: bool, of_weight: bool, of_bias: bool, streams: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, sums of rows, and the gradients that are wanted."""
    how = LossSettings(
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction=reduction,
    )  # fmt: skip
    loss, sums = x.new_empty(len(x), dtype=wider(x.dtype)), x.new_empty(len(x), 2, dtype=wider(x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        head = _Head(x, weight, bias, target, how, chunks, sum_in, streams)
        head.want(of_x, of_weight, of_bias)
        factor, gradient = _factor(x, target, how), of_x or of_weight or of_bias
        for piece in head.pieces():
            loss[piece], sums[piece] = head.chunk(piece, factor, None, gradient)
        return loss if reduction == "none" else loss.sum() * factor, sums, *head.made()


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sums: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float, reduction: str, chunks: int, sum_in: str, of_x: bool, of_weight: bool, of_bias: bool, streams: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients, from logits that are computed again."""
    how = LossSettings(
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction=reduction,
    )  # fmt: skip
    with torch.autocast(x.device.type, enabled=False):
        head = _Head(x, weight, bias, target, how, chunks, sum_in, streams)
        head.want(of_x, of_weight, of_bias)
        factor = grad * _factor(x, target, how)
        for piece in head.pieces():
            head.chunk(piece, factor, sums, True)
        return head.made()


def _fake_made(x: Tensor, weight: Tensor, bias: Tensor | None, of_x: bool, of_weight: bool, of_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if of_x else 0), x.new_empty(weight.shape if of_weight else 0, dtype=weight.dtype if of_weight else x.dtype),
        x.new_empty(0) if bias is None or not of_bias else torch.empty_like(bias),
    )  # fmt: skip


def _fake_forward(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    rows = x.new_empty(len(x), dtype=wider(x.dtype))
    loss = rows if settings[4] == "none" else rows.new_empty(())
    return loss, rows.new_empty(len(x), 2), *_fake_made(x, weight, bias, *settings[7:])


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sums: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_made(x, weight, bias, *settings[7:])


_SETTINGS = (
    "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction, int chunks, str sum_in, bool of_x, bool of_weight, bool of_bias"
)
_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor target"


_op = define(
    "linear_cross_entropy", f"({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", plain=forward,
    triton="cross_entropy.linear_cross_entropy", fake=_fake_forward,
)  # fmt: skip
_op_backward = define(
    "linear_cross_entropy_backward", f"(Tensor grad, {_INPUTS}, Tensor sums, {_SETTINGS}) -> (Tensor, Tensor, Tensor)", plain=backward,
    triton="cross_entropy.linear_cross_entropy_backward", fake=_fake_backward,
)  # fmt: skip


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *ctx.settings = inputs
    _, sums, *made = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(sums, *made)
    ctx.made = any(ctx.settings[-3:])
    ctx.save_for_backward(*(made if ctx.made else (x, weight, bias, target, sums)))


def _times(made: Tensor, grad: Tensor) -> Tensor:
    """In place; a compiler that traces this finds a place itself."""
    if type(made) is not Tensor:
        return made * grad
    _scale_(made, grad)
    torch.autograd.graph.increment_version(made)  # a second backward through the loss is refused
    return made


def _gradient(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 14
    wanted = ctx.needs_input_grad[:3]
    if ctx.made:
        found = [_times(one, grad) if want else None for one, want in zip(ctx.saved_tensors, wanted, strict=True)]
    else:
        x, weight, bias, target, sums = ctx.saved_tensors
        every = _op_backward(grad.contiguous(), x, weight, bias, target, sums, *ctx.settings[:-3], *wanted)
        found = [one if want else None for one, want in zip(every, wanted, strict=True)]
    return *found, *(None,) * 11


differentiate("linear_cross_entropy", _context, _gradient)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 0.0, reduction: str = "mean", chunks: int | None = None, recompute: bool = False, sums: str = AUTO,
) -> Tensor:  # fmt: skip
    """`F.cross_entropy(x @ weight.T + bias, target)` over chunks of the rows, in float32; rows of float64 stay in it.

    `recompute` makes the gradients in backward, from logits computed again: what backs twice through one loss needs it. Sharded tensors and
    formats that `F.linear` does not take together are left to torch."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, not one of {', '.join(REDUCTIONS)}")
    if sums not in SUMS:
        raise ValueError(f"sums is {sums!r}, not one of {', '.join(SUMS)}")
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap, "reduction": reduction}
    autocast = torch.is_autocast_enabled(x.device.type)
    given = [one for one in (x, weight, bias) if one is not None]
    if any(isinstance(one, DTensor) for one in (*given, target)) or target.is_floating_point() or not (
        autocast or all(one.dtype == x.dtype for one in given)
    ):  # fmt: skip
        return reference(x, weight, target, bias, **how)
    if autocast and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows, flat = x.flatten(0, -2), target.flatten().contiguous()
    asked = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in (x, weight, bias)]
    if recompute or reduction == "none" or x.dtype == torch.float16:
        asked = [False] * 3
    count = default_chunks(len(rows)) if chunks is None else chunks
    loss = _op(rows, weight, bias, flat, *how.values(), count, sums, *asked)[0]
    return loss.view(target.shape) if reduction == "none" else loss


# ---------------------------------------------------------------- where it serves


def default_chunks(rows: int) -> int:
    """Where nobody planned them: at most as many as keep a 16-bit gradient exact, and none of fewer rows than products like."""
    return max(1, min(MOST_ROUNDINGS, rows // 1024))


def shape_of(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Shape:
    return {"rows": x.shape[:-1].numel(), "width": x.shape[-1], "words": weight.shape[0]}


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    x = torch.randn(shape["rows"], shape["width"], dtype=dtype, device=device)
    weight = torch.randn(shape["words"], shape["width"], dtype=dtype, device=device) * (2 * shape["width"] ** -0.5)
    return x, weight, torch.randint(shape["words"], (shape["rows"],), device=device)


DECLARED = (
    {"rows": 16384, "width": 4096, "words": 128256}, {"rows": 16384, "width": 2048, "words": 128256}, {"rows": 16384, "width": 768, "words": 50257},
)  # fmt: skip
BUCKETS = (
    ShapeBucket(name="to 65536 words", limits={"words": (1, 65536)}, config={"warps": 16, "block": 8192, "streams": 1}),
    ShapeBucket(name="more words", limits={"words": (65537, 1 << 20)}, config={"warps": 32, "block": 16384, "streams": 1}),
)
KERNEL = TrainingKernel(
    name="linear_cross_entropy", says="output layer and cross entropy, with their gradients, in chunks of rows", reference=reference,
    call=linear_cross_entropy, shape_of=shape_of, buckets=BUCKETS, dtypes=(torch.bfloat16, torch.float16, torch.float32), measured_at=DECLARED, draw=draw,
    floor_bytes=lambda shape, size: size * (4 * shape["rows"] * shape["words"] + 2 * shape["rows"] * shape["width"] + 2 * shape["words"] * shape["width"]),
    saved_bytes=lambda shape, size: size * (shape["rows"] + shape["words"]) * shape["width"],
)  # fmt: skip
