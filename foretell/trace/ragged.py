"""Sequences of unequal length: packing, recurrent layers over packed ones, CTC.

Lengths are numbers that the op reads; where they are known (`trace.values`) sizes are exact, else every sequence is as long
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

from foretell.trace.reading import SPECIAL, Reading
from foretell.trace.recorder import Recorder
from foretell.trace.values import attach, known


def lengths_of(mode: Reading, tensor: Any, longest: int) -> list[int]:
    """Lengths as numbers."""
    if not isinstance(tensor, Tensor):
        return [int(length) for length in tensor]
    twin = known(tensor)
    if twin is None:
        mode.assumed.add(f"sequences in module '{mode._here()}' are taken to be {longest} long, all of them")
        return [longest] * tensor.numel()
    with no_dispatch():
        return [int(length) for length in twin.flatten().tolist()]


def _pack(mode: Reading, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    source, lengths, batch_first = args
    mode.before_packing()
    longest = source.shape[1 if batch_first else 0]
    found = lengths_of(mode, lengths, longest)
    with mode, no_dispatch():
        steps = torch.tensor([sum(length > step for length in found) for step in range(max(found))])
    with mode:
        data = source.new_empty((sum(found), *source.shape[2:]))
        sizes = torch.empty(len(steps), dtype=torch.int64)
    attach(sizes, steps)
    return data, sizes


def _ctc(mode: Reading, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
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
    return (whole.transpose(0, 1) if batch_first else whole), lengths


def packed_rnn(
    kind: str, dense: Callable[..., tuple[Tensor, ...]], recorder: Recorder, data: Tensor, batch_sizes: Tensor, hx: Any,
    params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """cuDNN's op over as many steps and samples as are packed: those of one long sequence."""
    if recorder.capability is not None:
        recorder.assumed.add("cuDNN's reserve for packed sequences is taken to be that of one sequence as long as all of them")
    hidden = list(hx) if kind == "lstm" else [hx]
    first = [one.narrow(1, 0, 1) for one in hidden] if recorder.capability is not None else hidden
    output, *last = dense(
        recorder, data.unsqueeze(1), first if kind == "lstm" else first[0], params, has_biases, num_layers, dropout, train,
        bidirectional, False,
    )  # fmt: skip
    samples = hidden[0].shape[1]
    return output.squeeze(1), *(one.expand(-1, samples, -1) for one in last)


def _on_cpu(name: str) -> Callable[..., tuple[Tensor, ...]]:
    op = getattr(torch.ops.aten, name).input

    def dense(recorder: Recorder, data: Tensor, hidden: Any, *rest: Any) -> Any:
        narrow = [one.narrow(1, 0, 1) for one in hidden] if name == "lstm" else hidden.narrow(1, 0, 1)
        return op(data, narrow, *rest)

    return dense


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
    from foretell.trace import cuda_rnn

    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {
        "_pack_padded_sequence_backward": functools.partial(pack_backward, recorder),
        "_pad_packed_sequence": functools.partial(pad, recorder),
    }
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        dense = getattr(cuda_rnn, name) if recorder.capability is not None else _on_cpu(name)
        kernels[f"{name}.data"] = functools.partial(packed_rnn, name, dense, recorder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, kernel in kernels.items():
            library.impl(op, kernel, "CompositeImplicitAutograd", allow_override=True)
    return library
