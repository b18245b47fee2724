"""All steps of a head in one launch: LSTM, GRU and sLSTM, forward and backward.

A program has a head and some rows of the batch. Recurrent matrices are loaded once and stay on the chip, states stay in registers; of a
step the gates' input is read and the output written. The backward goes through the steps in reverse and writes gradients of the gates;
those of the matrices are one product afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretell.kernels.kernel import wider
from foretell.kernels.papers.recurrent import CELLS, KEPT_GATES, STATES, by_steps, by_steps_backward

MOST = 64
"""Elements of a head: four matrices of 64 × 64 in half precision are 32 KiB."""
ROWS = 16
"""Of the batch in a program: the least that tensor cores take."""
CELL = {"lstm": 0, "gru": 1, "slstm": 2}


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _log_sigmoid(x):  # type: ignore[no-untyped-def]
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.dot(a.to(b.dtype), b, input_precision=PRECISION).to(tl.float32)


@triton.jit
def _four(at, stride, there, GATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """What three or four gates have at a step."""
    a0 = tl.load(at, mask=there, other=0.0)
    a1 = tl.load(at + stride, mask=there, other=0.0)
    a2 = tl.load(at + 2 * stride, mask=there, other=0.0)
    a3 = a2
    if GATES == 4:
        a3 = tl.load(at + 3 * stride, mask=there, other=0.0)
    return a0, a1, a2, a3


@triton.jit
def _before(kept, first, step, gate, there, row):  # type: ignore[no-untyped-def]
    """A state before a step: what was kept after the one before, or the first state; `kept` is where the step's own is."""
    number = row[:, None] * 0 + step
    earlier = tl.load(kept - gate, mask=there & (number > 0), other=0.0).to(tl.float32)
    return earlier + tl.load(first, mask=there & (number == 0), other=0.0)


@triton.jit
def forward_steps(x, weight, bias, state, out, last, gates, states, batch, time, heads,
                  SIZE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, GATES: tl.constexpr, CELL: tl.constexpr, KEEP: tl.constexpr,
                  PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at, into = tl.arange(0, DIM), tl.arange(0, DIM)
    there = (row[:, None] < batch) & (at[None, :] < SIZE)
    inside = (into[:, None] < SIZE) & (at[None, :] < SIZE)
    w0, w1, w2, w3 = _four(weight + (head * SIZE + at[None, :]) * SIZE + into[:, None], heads * SIZE * SIZE, inside, GATES)
    b0, b1, b2, b3 = _four(bias + head * SIZE + at, heads * SIZE, at < SIZE, GATES)
    gate = heads * SIZE
    each = row[:, None].to(tl.int64) * gate + head * SIZE + at[None, :]
    of_state = batch.to(tl.int64) * gate
    h = tl.load(state + each, mask=there, other=0.0)
    if CELL != 1:
        c = tl.load(state + of_state + each, mask=there, other=0.0)
    if CELL == 2:
        n = tl.load(state + 2 * of_state + each, mask=there, other=1.0)
        m = tl.load(state + 3 * of_state + each, mask=there, other=0.0)
    at_step = row[:, None].to(tl.int64) * time * gate + head * SIZE + at[None, :]
    from_x = x + row[:, None].to(tl.int64) * time * GATES * gate + head * SIZE + at[None, :]
    x0, x1, x2, x3 = _four(from_x, gate, there, GATES)
    for step in range(time):
        a0 = x0.to(tl.float32) + b0.to(tl.float32)[None, :]
        a1 = x1.to(tl.float32) + b1.to(tl.float32)[None, :]
        a2 = x2.to(tl.float32)
        a3 = x3.to(tl.float32) + b3.to(tl.float32)[None, :]
        from_x += tl.where(step + 1 < time, GATES * gate, 0)  # the next step's are on their way while this one is computed
        x0, x1, x2, x3 = _four(from_x, gate, there, GATES)
        a0 += _dot(h, w0, PRECISION)
        a1 += _dot(h, w1, PRECISION)
        own = _dot(h, w2, PRECISION) + b2.to(tl.float32)[None, :]
        if CELL == 1:
            a0, a1 = tl.sigmoid(a0), tl.sigmoid(a1)
            a2 = _tanh(a2 + a0 * own)
            h = a2 + a1 * (h - a2)
            a3 = own
        else:
            a2 += own
            a3 += _dot(h, w3, PRECISION)
        if CELL == 0:
            a0, a1, a2, a3 = tl.sigmoid(a0), tl.sigmoid(a1), _tanh(a2), tl.sigmoid(a3)
            c = a1 * c + a0 * a2
            h = a3 * _tanh(c)
        if CELL == 2:
            forget = _log_sigmoid(a1) + m
            m = tl.maximum(a0, forget)
            enter, stay = tl.exp(a0 - m), tl.exp(forget - m)
            c = stay * c + enter * _tanh(a2)
            n = stay * n + enter
            h = tl.sigmoid(a3) * c / n
        tl.store(out + at_step, h.to(out.dtype.element_ty), mask=there)
        if KEEP:
            to_gates = gates + 4 * at_step - 3 * (head * SIZE + at[None, :])
            tl.store(to_gates, a0.to(gates.dtype.element_ty), mask=there)
            tl.store(to_gates + gate, a1.to(gates.dtype.element_ty), mask=there)
            tl.store(to_gates + 2 * gate, a2.to(gates.dtype.element_ty), mask=there)
            tl.store(to_gates + 3 * gate, a3.to(gates.dtype.element_ty), mask=there)
            if CELL != 1:
                tl.store(states + at_step, c, mask=there)
            if CELL == 2:
                tl.store(states + of_state * time + at_step, n, mask=there)
                tl.store(states + 2 * of_state * time + at_step, m, mask=there)
        at_step += gate
    tl.store(last + each, h, mask=there)
    if CELL != 1:
        tl.store(last + of_state + each, c, mask=there)
    if CELL == 2:
        tl.store(last + 2 * of_state + each, n, mask=there)
        tl.store(last + 3 * of_state + each, m, mask=there)


@triton.jit
def _gru_down(dh, before, a0, a1, a2, own):  # type: ignore[no-untyped-def]
    """Of the gates, of the third recurrent product, and of the state before but for the products."""
    d2 = dh * (1.0 - a1) * (1.0 - a2 * a2)
    return d2 * own * a0 * (1.0 - a0), dh * (before - a2) * a1 * (1.0 - a1), d2, d2 * a0, dh * a1


@triton.jit
def _lstm_down(dh, dc, c, before, a0, a1, a2, a3):  # type: ignore[no-untyped-def]
    bent = _tanh(c)
    dc += dh * a3 * (1.0 - bent * bent)
    return dc * a2 * a0 * (1.0 - a0), dc * before * a1 * (1.0 - a1), dc * a0 * (1.0 - a2 * a2), dh * bent * a3 * (1.0 - a3), dc * a1


@triton.jit
def _slstm_down(dh, dc, dn, dm, c, n, m, before, n_before, m_before, a0, a1, a2, a3):  # type: ignore[no-untyped-def]
    forget = _log_sigmoid(a1) + m_before
    enter, stay, z, o = tl.exp(a0 - m), tl.exp(forget - m), _tanh(a2), tl.sigmoid(a3)
    d3 = dh * c / n * o * (1.0 - o)
    dc += dh * o / n
    dn -= dh * o * c / (n * n)
    denter, dstay = (dc * z + dn) * enter, (dc * before + dn * n_before) * stay
    dm = dm - denter - dstay
    d0 = denter + tl.where(a0 >= forget, dm, 0.0)
    dm = dstay + tl.where(a0 >= forget, 0.0, dm)
    return d0, dm * tl.sigmoid(-a1), dc * enter * (1.0 - z * z), d3, dc * stay, dn * stay, dm


@triton.jit
def backward_steps(dout, dlast, weight, state, out, gates, states, dx, dstate, dthird, batch, time, heads,
                   SIZE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, GATES: tl.constexpr, CELL: tl.constexpr,
                   PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at, of = tl.arange(0, DIM), tl.arange(0, DIM)
    there = (row[:, None] < batch) & (at[None, :] < SIZE)
    inside = (of[:, None] < SIZE) & (at[None, :] < SIZE)
    w0, w1, w2, w3 = _four(weight + (head * SIZE + of[:, None]) * SIZE + at[None, :], heads * SIZE * SIZE, inside, GATES)
    gate = heads * SIZE
    column = head * SIZE + at[None, :]
    each = row[:, None].to(tl.int64) * gate + column
    of_state = batch.to(tl.int64) * gate
    of_states = of_state * time
    at_step = (row[:, None].to(tl.int64) * time + time - 1) * gate + column
    kept = out
    first = state
    dh = tl.load(dlast + each, mask=there, other=0.0)
    if CELL != 1:
        kept, first = states, state + of_state
        dc = tl.load(dlast + of_state + each, mask=there, other=0.0)
        c = tl.load(states + at_step, mask=there, other=0.0)
    if CELL == 2:
        dn = tl.load(dlast + 2 * of_state + each, mask=there, other=0.0)
        dm = tl.load(dlast + 3 * of_state + each, mask=there, other=0.0)
        n = tl.load(states + of_states + at_step, mask=there, other=1.0)
        m = tl.load(states + 2 * of_states + at_step, mask=there, other=0.0)
        n_next = _before(states + of_states + at_step, first + of_state + each, time - 1, gate, there, row)
        m_next = _before(states + 2 * of_states + at_step, first + 2 * of_state + each, time - 1, gate, there, row)
    before_next = _before(kept + at_step, first + each, time - 1, gate, there, row)
    up_next = tl.load(dout + at_step, mask=there, other=0.0)
    g0, g1, g2, g3 = _four(gates + 4 * at_step - 3 * column, gate, there, 4)
    for back in range(time):
        before = before_next
        dh += up_next.to(tl.float32)
        a0, a1, a2, a3 = g0.to(tl.float32), g1.to(tl.float32), g2.to(tl.float32), g3.to(tl.float32)
        to_x = dx + GATES * at_step - (GATES - 1) * column
        here = at_step
        step = tl.maximum(time - 2 - back, 0)  # the one before is on its way while this one is computed
        at_step -= tl.where(back + 1 < time, gate, 0)
        before_next = _before(kept + at_step, first + each, step, gate, there, row)
        up_next = tl.load(dout + at_step, mask=there, other=0.0)
        g0, g1, g2, g3 = _four(gates + 4 * at_step - 3 * column, gate, there, 4)
        if CELL == 1:
            d0, d1, d2, third, dh = _gru_down(dh, before, a0, a1, a2, a3)
            tl.store(dthird + here, third.to(dthird.dtype.element_ty), mask=there)
            dh += _dot(d0, w0, PRECISION) + _dot(d1, w1, PRECISION) + _dot(third, w2, PRECISION)
        if CELL == 0:
            d0, d1, d2, d3, dc = _lstm_down(dh, dc, c, before, a0, a1, a2, a3)
        if CELL == 2:
            n_before, m_before = n_next, m_next
            n_next = _before(states + of_states + at_step, first + of_state + each, step, gate, there, row)
            m_next = _before(states + 2 * of_states + at_step, first + 2 * of_state + each, step, gate, there, row)
            d0, d1, d2, d3, dc, dn, dm = _slstm_down(dh, dc, dn, dm, c, n, m, before, n_before, m_before, a0, a1, a2, a3)
            n, m = tl.where(there, n_before, 1.0), m_before
        if CELL != 1:
            c = before
        tl.store(to_x, d0.to(dx.dtype.element_ty), mask=there)
        tl.store(to_x + gate, d1.to(dx.dtype.element_ty), mask=there)
        tl.store(to_x + 2 * gate, d2.to(dx.dtype.element_ty), mask=there)
        if CELL != 1:
            tl.store(to_x + 3 * gate, d3.to(dx.dtype.element_ty), mask=there)
            dh = _dot(d0, w0, PRECISION) + _dot(d1, w1, PRECISION) + _dot(d2, w2, PRECISION) + _dot(d3, w3, PRECISION)
    tl.store(dstate + each, dh, mask=there)
    if CELL != 1:
        tl.store(dstate + of_state + each, dc, mask=there)
    if CELL == 2:
        tl.store(dstate + 2 * of_state + each, dn, mask=there)
        tl.store(dstate + 3 * of_state + each, dm, mask=there)


def _shape(size: int, dtype: torch.dtype, cell: str) -> dict[str, object]:
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "SIZE": size, "DIM": max(16, triton.next_power_of_2(size)), "ROWS": ROWS, "GATES": CELLS[cell], "CELL": CELL[cell],
        "PRECISION": "tf32x3" if exact else "tf32", "num_warps": 4, "num_stages": 1,
    }  # fmt: skip


def serves(x: Tensor, size: int) -> bool:
    return size <= MOST and x.dtype != torch.float64 and x.shape[0] * x.shape[1] > 0


def forward(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, cell: str, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, time, _, heads, size = x.shape
    if not serves(x, size):
        return by_steps(x, weight, bias, state, cell, keep)
    wide = wider(x.dtype)
    out, last = x.new_empty(batch, time, heads, size), torch.empty_like(state, dtype=wide)
    if keep:
        gates = x.new_empty(batch, time, KEPT_GATES, heads, size, dtype=wide if cell == "slstm" else x.dtype)
        states = x.new_empty(STATES[cell] - 1, batch, time, heads, size, dtype=wide)
    else:
        gates, states = x.new_empty(0), x.new_empty(0)
    forward_steps[(heads, triton.cdiv(batch, ROWS))](
        x, weight, bias, state.to(wide), out, last, gates, states, batch, time, heads, KEEP=keep, **_shape(size, x.dtype, cell)
    )
    return out, last, gates, states


def backward(
    dout: Tensor, dlast: Tensor, weight: Tensor, state: Tensor, out: Tensor, gates: Tensor, states: Tensor, cell: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch, time, heads, size = out.shape
    if not serves(out, size):
        return by_steps_backward(dout, dlast, weight, state, out, gates, states, cell)
    wide = wider(out.dtype)
    dx, dstate = out.new_empty(batch, time, CELLS[cell], heads, size), torch.empty_like(dlast, dtype=wide)
    dthird = torch.empty_like(out) if cell == "gru" else out.new_empty(0)
    backward_steps[(heads, triton.cdiv(batch, ROWS))](
        dout, dlast.to(wide), weight, state.to(wide), out, gates, states, dx, dstate, dthird, batch, time, heads, **_shape(size, out.dtype, cell)
    )
    return dx, dstate, dthird
