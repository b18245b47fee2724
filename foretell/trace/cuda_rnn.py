"""Recurrent layers as cuDNN runs them: one op for the whole sequence, with a reserve kept for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foretell.trace.recorder import Recorder

RESERVE = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
"""Elements that cuDNN is assumed to keep per cell (sample, step, hidden unit, direction and layer): gates and states."""


class _CudnnRnn(torch.autograd.Function):
    """`_cudnn_rnn` and its backward: all weights in one buffer, all their gradients in another."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, kind: str, shape: dict[str, Any], input: Tensor, *rest: Tensor) -> Any:
        states, weights = rest[: shape["states"]], rest[shape["states"] :]
        output_shape = (*input.shape[:2], shape["hidden"] * shape["directions"])
        cells = input.shape[0] * input.shape[1] * shape["hidden"] * shape["directions"] * shape["layers"]
        reserve_bytes = RESERVE[kind] * cells * input.element_size() if shape["train"] else 0
        made = recorder.emit(
            "aten._cudnn_rnn.default",
            (input, weights, states),
            lambda: (
                input.new_empty(output_shape),
                *(torch.empty_like(state) for state in states),
                torch.empty(reserve_bytes, dtype=torch.uint8),
            ),
        )
        output, reserve = made[0], made[-1]
        ctx.recorder, ctx.shape = recorder, shape
        ctx.save_for_backward(input, output, reserve, *states, *weights)
        return output, *made[1:-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grad_states: Tensor) -> Any:
        input, output, reserve, *rest = ctx.saved_tensors
        states, weights = rest[: ctx.shape["states"]], rest[ctx.shape["states"] :]

        def make() -> list[Tensor]:
            flat = input.new_empty(sum(weight.numel() for weight in weights))
            parts = flat.split([weight.numel() for weight in weights])
            return [
                torch.empty_like(input),
                *(torch.empty_like(state) for state in states),
                *(part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)),
            ]

        found = ctx.recorder.emit(
            "aten._cudnn_rnn_backward.default", (input, weights, states, output, grad, reserve), make
        )
        return None, None, None, *found


def _run(
    kind: str, recorder: Recorder, input: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], num_layers: int,
    train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    recorder.assumed.add(f"cuDNN's reserve for {kind} is assumed ({RESERVE[kind]} elements a cell), not measured")
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        input, *states = (tensor.to(dtype) for tensor in (input, *states))
        params = [weight.to(dtype) for weight in params]
    shape = {
        "states": len(states), "hidden": states[0].shape[-1], "directions": 2 if bidirectional else 1,
        "layers": num_layers, "train": train and torch.is_grad_enabled(),
    }  # fmt: skip
    return _CudnnRnn.apply(recorder, kind, shape, input, *states, *params)  # type: ignore[no-any-return]


def lstm(
    recorder: Recorder, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _run("lstm", recorder, input, list(hx), params, num_layers, train, bidirectional)


def gru(
    recorder: Recorder, input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _run("gru", recorder, input, [hx], params, num_layers, train, bidirectional)


def rnn_tanh(recorder: Recorder, input: Tensor, hx: Tensor, params: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    _, num_layers, _, train, bidirectional, _ = rest
    return _run("rnn_tanh", recorder, input, [hx], params, num_layers, train, bidirectional)


def rnn_relu(recorder: Recorder, input: Tensor, hx: Tensor, params: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    _, num_layers, _, train, bidirectional, _ = rest
    return _run("rnn_relu", recorder, input, [hx], params, num_layers, train, bidirectional)
