"""What cuDNN takes for a recurrent layer while it runs: one workspace, and copies that lie time first.

Read off 24 layers on an H200 (cuDNN 9.19): LSTM, GRU and plain cells, one to four layers, one and two ways. In units of
elements, with T steps, B samples, H hidden units and I inputs, every layer and direction takes a copy of its matrices,
8 MiB for the products and a few B·H; beside that there are a few T·B·H, the same for one layer as for four.
"""

from __future__ import annotations

from typing import NamedTuple

from foretell.price.kernels.scratch_data import Buffers
from foretell.trace.types import Op
from foretell.units import DTYPE_BYTES, MIB

_LSTM, _GRU = 2, 3
_GATES = {_LSTM: 4, _GRU: 3}
_PRODUCTS = 8 * MIB
_STATES = {_LSTM: (10, 12), _GRU: (14, 14)}
"""B·H per layer and direction: one way, both ways. 5 for plain cells."""
_STEPS = {_LSTM: (5, 14), _GRU: (5, 12)}
"""T·B·H: one way, both ways. 5 and 21 for plain cells, the last seen in one layer only."""


class _Layer(NamedTuple):
    mode: int
    hidden: int
    layers: int
    dropout: float
    both_ways: bool
    dtype: str
    tokens: int
    batch: int
    inputs: int

    @property
    def is_persistent(self) -> bool:
        """Whether PyTorch asks cuDNN for its persistent kernels: fp16, one layer, one way, sizes that suit them."""
        return (
            self.dtype == "float16" and self.layers == 1 and not self.both_ways and self.mode != _GRU
            and self.hidden <= 1024 and self.hidden % 128 == 0 and self.inputs % 128 == 0
            and self.batch % 8 == 0 and self.batch <= 128
            and (self.mode == _LSTM or self.batch < 96 or self.hidden < 896)
        )  # fmt: skip

    @property
    def matrices(self) -> int:
        directions = 2 if self.both_ways else 1
        rows = directions * _GATES.get(self.mode, 1) * self.hidden
        return rows * (self.inputs + self.hidden + (self.layers - 1) * (directions + 1) * self.hidden)

    @property
    def workspace(self) -> int:
        element = DTYPE_BYTES[self.dtype]
        cells, states = self.tokens * self.hidden, self.batch * self.hidden
        if self.is_persistent:
            return element * (24 * cells + 4 * states)
        count = self.layers * (2 if self.both_ways else 1)
        steps = _STEPS.get(self.mode, (5, 21))[self.both_ways]
        if self.mode == _LSTM and self.dropout and not self.both_ways:
            steps += 1
        if self.mode == _LSTM or self.both_ways:
            steps_and_inputs = steps * cells + self.tokens * self.inputs
        else:
            steps_and_inputs = steps * cells
        total = self.matrices + steps_and_inputs + _STATES.get(self.mode, (5, 5))[self.both_ways] * count * states
        odd = (self.hidden % 2 or self.inputs % 2) and element * MIB // 2
        return element * total + count * (_PRODUCTS + odd) + 256


def _layer(op: Op) -> _Layer | None:
    """Mode, hidden units, projection, layers, batch first, dropout, train, both ways: as the op was called."""
    numbers = [value for value in op.attrs if not isinstance(value, str)]
    if len(numbers) < 8 or not op.inputs or len(op.inputs[0].spec.shape) != 3:
        return None
    mode, hidden, _, layers, batch_first, dropout, _, both_ways = numbers[:8]
    data = op.inputs[0].spec
    return _Layer(
        mode=int(mode), hidden=int(hidden), layers=int(layers), dropout=float(dropout), both_ways=bool(both_ways),
        dtype=data.dtype, tokens=data.shape[0] * data.shape[1], batch=data.shape[0 if batch_first else 1],
        inputs=data.shape[2],
    )  # fmt: skip


def _copied(op: Op) -> dict[int, int]:
    """Bytes of the inputs that do not lie time first, by position."""
    marks = [int(mark[8:]) for mark in op.attrs if isinstance(mark, str) and mark.startswith("strided:")]
    return {i: op.inputs[i].spec.nbytes for i in sorted(marks) if i < len(op.inputs)}


def forward(op: Op) -> Buffers:
    """The input with time first, and the workspace."""
    layer = _layer(op)
    return (*_copied(op).values(), layer.workspace) if layer else ()


def backward(op: Op) -> tuple[Buffers, ...]:
    """Zeros for gradients of the states, workspace, input and gradient with time first; for the weights only the input."""
    layer = _layer(op)
    if layer is None:
        return ((),)
    cubes = [ref.spec for ref in op.inputs if len(ref.spec.shape) == 3]  # input, states, output, gradients
    states = cubes[1 : 3 if layer.mode == _LSTM else 2]
    missing = states if len(cubes) <= 3 + len(states) else []
    kept = (*(spec.nbytes for spec in missing), layer.workspace)
    copied = _copied(op)
    return (*kept, *copied.values()), (*kept, copied.get(0, 0))
