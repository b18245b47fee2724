"""Recurrent layers as cuDNN runs them: one op for the whole sequence, with a reserve for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from foretell.trace.recorder import Recorder


def lstm(recorder: Recorder, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


def gru(recorder: Recorder, *args: Any) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def rnn_tanh(recorder: Recorder, *args: Any) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def rnn_relu(recorder: Recorder, *args: Any) -> tuple[Tensor, Tensor]:
    raise NotImplementedError
