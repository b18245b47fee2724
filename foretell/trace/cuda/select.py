"""What CUDA would do: the one table of choices in which a CUDA step differs from a CPU one.

PyTorch picks kernels by device: attention backends, dropout with a stored mask, fused norms, cuDNN's
recurrent layers and batch norm, foreach optimizers. On fake CPU tensors it would pick the CPU's. While
`cuda_choices` is open, CUDA's are made instead. The entries are held against a real GPU: op lists of the zoo
equal a dispatch trace of the CUDA step. Recurrent layers included. What differs between releases of torch is in `versions.toml`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from foretell.trace.cuda.attention import attention
from foretell.trace.cuda.autocast import CudaAutocast
from foretell.trace.cuda.norm import batch_norm, dropout, log_softmax, one_hot, rms_norm, softmax
from foretell.trace.cuda.rnn import gru, lstm, rnn_relu, rnn_tanh
from foretell.trace.record.recorder import Recorder

Choice = Callable[..., Any]

CHOICES: dict[str, Choice] = {
    "scaled_dot_product_attention": attention,
    "dropout": dropout,
    "rms_norm": rms_norm,
    "batch_norm": batch_norm,
    "softmax.int": softmax,
    "log_softmax.int": log_softmax,
    "one_hot": one_hot,
    "lstm.input": lstm,
    "gru.input": gru,
    "rnn_tanh.input": rnn_tanh,
    "rnn_relu.input": rnn_relu,
}
"""Composite op → what CUDA runs for it, given the recorder and the op's own arguments."""


@contextmanager
def cuda_choices(recorder: Recorder, capability: tuple[int, int], release: str) -> Iterator[None]:
    """Make the choices of CUDA under a release of torch, for a device of this compute capability, until the end of the block."""
    library = torch.library.Library("aten", "IMPL")
    recorder.capability, recorder.release = capability, release
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(library._destroy)
        for name, choice in CHOICES.items():
            library.impl(name, _bind(choice, recorder), "CompositeImplicitAutograd", allow_override=True)
        casts = stack.enter_context(CudaAutocast(release))
        stack.enter_context(mock.patch.object(torch, "clear_autocast_cache", _forgetting(casts)))
        for user in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
            stack.enter_context(mock.patch(f"{user}._get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"]))
            stack.enter_context(mock.patch(f"{user}._foreach_supported_types", [Tensor, nn.Parameter, FakeTensor]))
        yield


@contextmanager
def real_masks(recorder: Recorder) -> Iterator[None]:
    """transformers builds other attention masks for fake tensors than for real ones; let it build the real ones.

    Masks that it leaves out, but builds under torch.compile, are noted. To be opened once the model is built: transformers
    may not be imported before.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(masks, "is_tracing", lambda *_: False))
        for name, kind in _LEFT_OUT.items():
            plain = getattr(masks, name, None)
            if plain is not None:
                stack.enter_context(mock.patch.object(masks, name, _noting(plain, kind, recorder.left_out)))
        yield


_LEFT_OUT = {"_ignore_causal_mask_sdpa": "causal", "_ignore_bidirectional_mask_sdpa": "full"}
"""transformers' question whether a mask may be left out → what kind of mask."""


def _noting(asked: Callable[..., Any], kind: str, noted: set[str]) -> Callable[..., Any]:
    @functools.wraps(asked)
    def answer(*args: Any, **kwargs: Any) -> Any:
        said = asked(*args, **kwargs)
        if said is True:
            noted.add(kind)
        return said

    return answer


def _forgetting(casts: CudaAutocast) -> Callable[[], None]:
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        casts.forget()

    return clear_both


def _bind(choice: Choice, recorder: Recorder) -> Choice:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return choice(recorder, *args, **kwargs)

    return kernel
