"""Recurrent layers as cuDNN runs them: one op for the whole sequence, with a reserve kept for backward.

On CUDA the weights of a layer lie in one buffer, which the op is given beside the weights. Under autocast they are
copied into an fp16 buffer at every call, whatever the dtype of autocast; bf16 weights are not kept in one buffer, so
that the op makes one. Op lists and reserves are those of torch 2.11 with cuDNN 9.19 on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foretell.trace.record.recorder import Recorder

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers."""
RESERVE = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 5, "gru": 6}
"""Elements kept per cell (sample, step, hidden unit, direction and layer), read off 24 measured layers."""
IN_ONE_BUFFER = (torch.float32, torch.float16, torch.float64)
"""Weights that `.to("cuda")` lays into one buffer."""
DROPOUT_STATE_BYTES = 6_488_064
"""Made once per process, by the first layer with dropout: measured on an H200."""

_states: WeakKeyDictionary[Recorder, Tensor] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class _RnnArguments:
    """The numbers `_cudnn_rnn` is called with."""

    kind: str
    hidden: int
    projection: int
    layers: int
    batch_first: bool
    dropout: float
    train: bool
    both_ways: bool

    @property
    def numbers(self) -> tuple[int | float | bool, ...]:
        return (
            MODES[self.kind], self.hidden, self.projection, self.layers, self.batch_first, self.dropout, self.train,
            self.both_ways,
        )  # fmt: skip

    def output(self, input: Tensor) -> Tensor:
        """Time comes first in memory, whatever comes first in shape."""
        width = (self.projection or self.hidden) * (2 if self.both_ways else 1)
        first, second = input.shape[:2]
        if not self.batch_first:
            return input.new_empty((first, second, width))
        return input.new_empty((second, first, width)).transpose(0, 1)

    def like_input(self, input: Tensor) -> Tensor:
        if not self.batch_first:
            return input.new_empty(input.shape)
        return input.new_empty((input.shape[1], input.shape[0], input.shape[2])).transpose(0, 1)

    def is_copied(self, tensor: Tensor) -> bool:
        """cuDNN wants time first and contiguous."""
        order = (2, 0, 1) if self.batch_first else (2, 1, 0)
        expected = 1
        for dim in order:
            if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
                return True
            expected *= tensor.shape[dim]
        return False

    def reserve_bytes(self, input: Tensor) -> int:
        """Gates and states of every cell, outputs between layers, a bit per element dropped there."""
        if not self.train:
            return 0
        directions = 2 if self.both_ways else 1
        cells = input.shape[0] * input.shape[1] * self.hidden
        kept = directions * cells * (RESERVE[self.kind] * self.layers + self.layers - 1) * input.element_size()
        bits = directions**2 * cells * (self.layers - 1) if self.dropout else 0
        return _aligned(kept) + _aligned(-(-bits // 8)) + 256


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


class _CudnnRnn(torch.autograd.Function):
    """`_cudnn_rnn` and its backward: all weights in one buffer, all their gradients in another."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, layer: _RnnArguments, buffer: Tensor | None, state: Tensor | None, states: int,
        input: Tensor, *rest: Tensor,
    ) -> Any:  # fmt: skip
        hidden, weights = rest[:states], rest[states:]
        made = recorder.emit(
            "aten._cudnn_rnn.default",
            (input, weights, buffer, hidden, state),
            lambda: (
                layer.output(input),
                *(torch.empty_like(tensor) for tensor in hidden),
                *([hidden[0].new_empty(0)] if states == 1 else []),
                torch.empty(layer.reserve_bytes(input), dtype=torch.uint8),
                input.new_empty(sum(weight.numel() for weight in weights)) if buffer is None else buffer,
            ),
            (*layer.numbers, *(["strided:0"] if layer.is_copied(input) else [])),
        )
        output, reserve, buffer = made[0], made[-2], made[-1]
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.layer, ctx.states = recorder, layer, states
        ctx.save_for_backward(input, output, reserve, buffer, state, *hidden, *weights)
        return output, *made[1 : 1 + states]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grad_hidden: Tensor | None) -> Any:
        input, output, reserve, buffer, state, *rest = ctx.saved_tensors
        layer: _RnnArguments = ctx.layer
        hidden, weights = rest[: ctx.states], rest[ctx.states :]
        wants_weights = any(ctx.needs_input_grad[6 + ctx.states :])

        def make() -> list[Tensor | None]:
            found = [layer.like_input(input), *(torch.empty_like(tensor) for tensor in hidden)]
            if not wants_weights:
                return [*found, *[None] * len(weights)]
            parts = torch.empty_like(buffer).split([weight.numel() for weight in weights])
            return [*found, *(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True))]

        marks = ["strided:0"] if layer.is_copied(input) else []
        if grad is not None and layer.is_copied(grad):
            marks.append(f"strided:{len(weights) + len(hidden) + 3}")
        found = ctx.recorder.emit(
            "aten._cudnn_rnn_backward.default",
            (input, weights, buffer, hidden, output, grad, grad_hidden, state, reserve),
            make,
            (*layer.numbers, *marks),
        )
        return None, None, None, None, None, *found


def _run(
    kind: str, recorder: Recorder, input: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    size, projection = hidden[-1].shape[-1], 0
    if kind == "lstm" and hidden[0].shape[-1] != size:
        projection = hidden[0].shape[-1]
        recorder.assumed.add("cuDNN's reserve for LSTMs with projections is taken to be that of LSTMs without")
    layer = _RnnArguments(
        kind=kind, hidden=size, projection=projection, layers=num_layers, batch_first=batch_first,
        dropout=float(dropout), train=train, both_ways=bidirectional,
    )  # fmt: skip
    buffer = _in_one_buffer(recorder, params)
    state = _dropout_state(recorder, train and dropout > 0)
    if torch.is_autocast_enabled("cpu"):
        if params[0].dtype != torch.float16:
            buffer, params = _copied_to_fp16(recorder, params)
        hidden = [tensor.to(torch.float16) for tensor in reversed(hidden)][::-1]
        input = input.to(torch.float16)
    return _CudnnRnn.apply(recorder, layer, buffer, state, len(hidden), input, *hidden, *params)  # type: ignore[no-any-return]


def _in_one_buffer(recorder: Recorder, params: Sequence[Tensor]) -> Tensor | None:
    """The buffer all weights lie in: on CUDA a storage of their own, here the first one's, made to look long enough."""
    first, together = params[0], params[0].dtype in IN_ONE_BUFFER
    count = sum(weight.numel() for weight in params) if together else first.numel()
    buffer = _laid_over(recorder, "aten.set_.source_Storage", first, 0, (count,))
    return buffer if together else None


def _copied_to_fp16(recorder: Recorder, params: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One new buffer, and the weights copied into pieces of it; gradients come back through the copies."""
    counts = [weight.numel() for weight in params]
    flat = torch.zeros(sum(counts), dtype=torch.float16)
    pieces = [
        _laid_over(recorder, "aten.set_.source_Storage_storage_offset", flat, sum(counts[:i]), (count, 1))
        for i, count in enumerate(counts)
    ]
    for piece, weight in zip(pieces, params, strict=True):
        piece.copy_(weight.view(-1, 1))
    return flat, pieces


def _laid_over(recorder: Recorder, name: str, source: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor of its own, and no view for autograd, on the storage of another.

    CUDA's comes from `set_`; on fake tensors that would keep the storage alive for ever.
    """
    torch.empty(0, dtype=source.dtype)
    with recorder.muted():
        tensor = source.detach().as_strided(shape, (1,) * len(shape), offset).detach()
    return recorder.emit(name, (tensor,), lambda: tensor)


def _dropout_state(recorder: Recorder, needed: bool) -> Tensor | None:
    """Random numbers' state, kept for the life of the process once any layer needed it."""
    state = _states.get(recorder)
    if state is None and needed:
        with recorder.muted():
            state = _states[recorder] = torch.empty(DROPOUT_STATE_BYTES, dtype=torch.uint8)
        recorder.storage_id(state, recorder._last)
    return state


def lstm(
    recorder: Recorder, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _run("lstm", recorder, input, list(hx), params, num_layers, dropout, train, bidirectional, batch_first)


def gru(recorder: Recorder, input: Tensor, hx: Tensor, params: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    _has_biases, *numbers = rest
    return _run("gru", recorder, input, [hx], params, *numbers)


def rnn_tanh(recorder: Recorder, input: Tensor, hx: Tensor, params: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    _has_biases, *numbers = rest
    return _run("rnn_tanh", recorder, input, [hx], params, *numbers)


def rnn_relu(recorder: Recorder, input: Tensor, hx: Tensor, params: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    _has_biases, *numbers = rest
    return _run("rnn_relu", recorder, input, [hx], params, *numbers)
