"""Sequences of unequal length: packing, recurrent layers over packed ones, CTC.

Lengths are numbers that the op reads; where they are known (`trace.record.values`) sizes are exact, else every sequence is as long
as the longest may be, and the trace says so.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from foretell.trace.record.reads import ReadingMode
from foretell.trace.record.recorder import Recorder
from foretell.trace.record.sized import SPECIAL
from foretell.trace.record.values import attach, known


def lengths_of(mode: ReadingMode, tensor: Any, longest: int) -> list[int]:
    """Lengths as numbers."""
    if not isinstance(tensor, Tensor):
        return [int(length) for length in tensor]
    twin = known(tensor)
    if twin is None:
        mode.assumed.add(f"sequences in module '{mode._here()}' are taken to be {longest} long, all of them")
        return [longest] * tensor.numel()
    with no_dispatch():
        return [int(length) for length in twin.flatten().tolist()]


def _pack(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    source, lengths, batch_first = args
    longest = source.shape[1 if batch_first else 0]
    found = lengths_of(mode, lengths, longest)
    with mode, no_dispatch():
        steps = torch.tensor([sum(length > step for length in found) for step in range(max(found))])
    with mode:
        data = source.new_empty((sum(found), *source.shape[2:]))
        sizes = torch.empty(len(steps), dtype=torch.int64)
    attach(sizes, steps)
    return data, sizes


def _ctc(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    scores, targets, _, target_lengths = args[:4]
    longest = targets.shape[1] if targets.dim() > 1 else targets.numel()
    width = 2 * max(lengths_of(mode, target_lengths, longest), default=0) + 1
    steps, samples = scores.shape[0], scores.shape[1] if scores.dim() == 3 else 1
    with mode:
        return scores.new_empty((samples,)), scores.new_empty((samples, steps, width))


SPECIAL["_pack_padded_sequence"] = _pack
SPECIAL["_ctc_loss"] = _ctc


# --- what PyTorch puts together from other ops, reading lengths as it goes ---------------------------------------------


def _sizes(recorder: Recorder, batch_sizes: Tensor, rows: int) -> list[int]:
    """Samples that have each step."""
    twin = known(batch_sizes)
    if twin is not None:
        with no_dispatch():
            return [int(size) for size in twin.tolist()]
    steps = batch_sizes.numel()
    return [rows // steps + (step < rows % steps) for step in range(steps)]


def pack_backward(recorder: Recorder, grad: Tensor, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool) -> Tensor:
    samples, steps = (input_size[0], input_size[1]) if batch_first else (input_size[1], input_size[0])
    whole = grad.new_zeros((steps, samples, *input_size[2:]))
    start = 0
    for step, size in enumerate(_sizes(recorder, batch_sizes, grad.shape[0])):
        whole[step].narrow(0, 0, size).copy_(grad.narrow(0, start, size))
        start += size
    return whole.transpose(0, 1) if batch_first else whole


def pad(
    recorder: Recorder, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sizes = _sizes(recorder, batch_sizes, data.shape[0])
    steps = max(len(sizes), total_length)
    whole = torch.full((steps, sizes[0], *data.shape[1:]), padding_value, dtype=data.dtype)
    start = first = 0
    for step, size in enumerate(sizes):
        if step + 1 == len(sizes) or sizes[step + 1] != size:
            count = step + 1 - first
            part = data.narrow(0, start, count * size).view(count, size, *data.shape[1:])
            whole.narrow(0, first, count).narrow(1, 0, size).copy_(part)
            start, first = start + count * size, step + 1
    lengths = torch.empty(sizes[0], dtype=torch.int64)
    with no_dispatch():
        found = torch.tensor([sum(size > sample for size in sizes) for sample in range(sizes[0])])
    attach(lengths, found)
    recorder.knows(lengths)
    return (whole.transpose(0, 1) if batch_first else whole), lengths


def packed_on_cuda(
    kind: str, recorder: Recorder, data: Tensor, batch_sizes: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """cuDNN's op over as many steps and samples as are packed: those of one long sequence."""
    from foretell.trace.cuda import rnn as cuda_rnn

    recorder.assumed.add("cuDNN's reserve for packed sequences is taken to be that of one sequence as long as all of them")
    hidden = [one.narrow(1, 0, 1) for one in (hx if kind == "lstm" else [hx])]
    output, *last = getattr(cuda_rnn, kind)(
        recorder, data.unsqueeze(1), hidden if kind == "lstm" else hidden[0], params, has_biases, num_layers, dropout, train,
        bidirectional, False,
    )  # fmt: skip
    samples = (hx[0] if kind == "lstm" else hx).shape[1]
    return output.squeeze(1), *(one.expand(-1, samples, -1) for one in last)


def packed_on_cpu(
    kind: str, recorder: Recorder, data: Tensor, batch_sizes: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Step by step over the samples that have it, as PyTorch does without a library for it."""
    sizes = _sizes(recorder, batch_sizes, data.shape[0])
    states = [hx] if kind != "lstm" else list(hx)
    each = [[state.select(0, place) for state in states] for place in range(states[0].shape[0])]
    count, ways, last = (4 if has_biases else 2), (2 if bidirectional else 1), []
    for layer in range(num_layers):
        outputs = []
        for way in range(ways):
            place = layer * ways + way
            output, end = _along(kind, data, sizes, each[place], params[count * place : count * (place + 1)], bool(way))
            outputs.append(output)
            last.append(end)
        data = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            data = torch.dropout(data, dropout, True)
    return data, *(torch.stack(list(ends)) for ends in zip(*last, strict=True))


def _along(
    kind: str, data: Tensor, sizes: list[int], first: list[Tensor], params: Sequence[Tensor], backwards: bool
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """One layer one way: fewer samples from step to step, or more where it goes backwards."""
    w_in, w_hidden, *biases = params
    b_in, b_hidden = biases if biases else (None, None)
    given = torch.nn.functional.linear(data, w_in, b_in)
    steps, ended, outputs = list(enumerate(sizes)), [], []
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    before = sizes[-1] if backwards else sizes[0]
    state = [one.narrow(0, 0, before) for one in first]
    for step, size in reversed(steps) if backwards else steps:
        if size < before:
            ended.append([one.narrow(0, size, before - size) for one in state])
            state = [one.narrow(0, 0, size) for one in state]
        elif size > before:
            state = [torch.cat([one, begin.narrow(0, before, size - before)]) for one, begin in zip(state, first, strict=True)]
        before = size
        state = _CELLS[kind](given.narrow(0, starts[step], size), state, w_hidden, b_hidden)
        outputs.append(state[0])
    ended.append(state)
    ends = [torch.cat(list(parts)) for parts in zip(*reversed(ended), strict=True)] if len(ended) > 1 else state
    return torch.cat(outputs[::-1] if backwards else outputs), ends


def _lstm_cell(given: Tensor, state: list[Tensor], weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    gates = torch.nn.functional.linear(state[0], weight, bias).add_(given)
    into, keep, new, out = gates.unsafe_chunk(4, 1)
    into, keep, new, out = into.sigmoid_(), keep.sigmoid_(), new.tanh_(), out.sigmoid_()
    cell = (keep * state[1]).add_(into * new)
    return [out * cell.tanh(), cell]


def _gru_cell(given: Tensor, state: list[Tensor], weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    from_input = given.unsafe_chunk(3, 1)
    from_hidden = torch.nn.functional.linear(state[0], weight, bias).unsafe_chunk(3, 1)
    reset = from_hidden[0].add_(from_input[0]).sigmoid_()
    keep = from_hidden[1].add_(from_input[1]).sigmoid_()
    new = from_input[2].add(from_hidden[2].mul_(reset)).tanh_()
    return [(state[0] - new).mul_(keep).add_(new)]


def _plain_cell(given: Tensor, state: list[Tensor], weight: Tensor, bias: Tensor | None, squash: str) -> list[Tensor]:
    return [getattr(torch, squash)(torch.nn.functional.linear(state[0], weight, bias).add_(given))]


_CELLS: dict[str, Callable[..., list[Tensor]]] = {
    "lstm": _lstm_cell, "gru": _gru_cell, "rnn_tanh": functools.partial(_plain_cell, squash="tanh"),
    "rnn_relu": functools.partial(_plain_cell, squash="relu"),
}  # fmt: skip


@contextmanager
def any_lengths(recorder: Recorder) -> Iterator[None]:
    """Python's kernels for these ops, from the first sequence that is packed until the end of the block."""
    libraries: list[Any] = []

    def install() -> None:
        if not libraries:
            libraries.append(_kernels(recorder))

    recorder.before_packing = install
    try:
        yield
    finally:
        for library in libraries:
            library._destroy()


def _kernels(recorder: Recorder) -> Any:
    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {
        "_pack_padded_sequence_backward": functools.partial(pack_backward, recorder),
        "_pad_packed_sequence": functools.partial(pad, recorder),
    }
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        packed = packed_on_cpu if recorder.capability is None else packed_on_cuda
        kernels[f"{name}.data"] = functools.partial(packed, name, recorder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, kernel in kernels.items():
            library.impl(op, kernel, "CompositeImplicitAutograd", allow_override=True)
    return library
