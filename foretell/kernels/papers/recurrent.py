"""Recurrent layers with heads: LSTM, GRU and sLSTM, all steps of a head in one launch.

FlashRNN (Pöppel et al. 2024, "FlashRNN: I/O-Aware Optimization of Traditional RNNs on modern hardware"): the recurrent matrix of a head
and its state stay on the chip for the whole sequence. What of the gates comes from the input is one product beforehand.

    LSTM    c = σ(f)·c + σ(i)·tanh(g)           h = σ(o)·tanh(c)                gates i f g o, states h c
    GRU     n = tanh(n + σ(r)·(R·h + b))        h = n + σ(z)·(h - n)            gates r z n, states h
    sLSTM   c = f'·c + i'·tanh(z)  n = f'·n + i'   h = σ(o)·c/n                 gates i f z o, states h c n m
            m = max(i, log σ(f) + m)  i' = exp(i - m)  f' = exp(log σ(f) + m - m of before)

A head sees its own state alone; with one head LSTM and GRU are those of torch.nn. On a GPU heads of 64 and less are one kernel each way
(`kernels/device/recurrent.py`); wider ones, float64 and a CPU take a loop over the steps whose gradient is written out.

Kept for the backward: of each step its gates, in the input's format (sLSTM: float32), and its states but h in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.kernels.kernel import define, differentiate, wider

CELLS = {"lstm": 4, "gru": 3, "slstm": 4}
"""And the gates of each."""
STATES = {"lstm": 2, "gru": 1, "slstm": 4}
KEPT_GATES = 4
"""Of a step: GRU keeps what its third gate has of the state, too."""
LAYERS = {nn.LSTM: "lstm", nn.GRU: "gru"}


def recurrent(x: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None, *, cell: str) -> tuple[Tensor, Tensor]:
    """Outputs (batch, time, heads, size) and the last states (states, batch, heads, size).

    `x` is what each gate has from the input, (batch, time, gates, heads, size); `weight` (gates, heads, size, size) and `bias`
    (gates, heads, size) are of the recurrent product. States are in float32 where `x` is in half precision.
    """
    _check(x, weight, bias, state, cell)
    batch, _, _, heads, size = x.shape
    if state is None:
        state = x.new_zeros(STATES[cell], batch, heads, size, dtype=wider(x.dtype))
        if cell == "slstm":
            state[3] = -torch.inf
    given = [one for one in (x, weight, bias, state) if one is not None]
    keep = torch.is_grad_enabled() and any(one.requires_grad for one in given)
    if bias is None:
        bias = x.new_zeros(weight.shape[:3])
    out, last, _, _ = _recurrent(x.contiguous(), weight.contiguous(), bias.contiguous(), state.contiguous(), cell, keep)
    return out, last


def run_layer(layer: nn.LSTM | nn.GRU, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
    """What `layer(x, hx)` computes, one head wide; all its layers, directions and dropout."""
    cell = LAYERS.get(type(layer))  # type: ignore[call-overload]
    if cell is None or layer.proj_size or not isinstance(x, Tensor) or x.dim() != 3:
        raise UserError(f"{type(layer).__name__} of {type(x).__name__}", "an LSTM or GRU without projection, and a padded batch in three dimensions")
    both = 1 + layer.bidirectional
    x = x if layer.batch_first else x.transpose(0, 1)
    found = []
    for depth in range(layer.num_layers):
        sides = []
        for side in range(both):
            name = f"l{depth}" + ("_reverse" if side else "")
            w, r = getattr(layer, f"weight_ih_{name}"), getattr(layer, f"weight_hh_{name}")
            b, c = (getattr(layer, f"bias_{kind}_{name}") if layer.bias else None for kind in ("ih", "hh"))
            size = layer.hidden_size
            gates = F.linear(x.flip(1) if side else x, w, b).view(*x.shape[:2], -1, 1, size)
            state = None
            if hx is not None:
                given = hx if cell == "lstm" else (hx,)
                state = torch.stack([one[depth * both + side] for one in given]).unsqueeze(2).to(wider(x.dtype))
            out, last = recurrent(gates, r.view(-1, 1, size, size), None if c is None else c.view(-1, 1, size), state, cell=cell)
            sides.append(out.squeeze(2).flip(1) if side else out.squeeze(2))
            found.append(last.squeeze(2).to(x.dtype))
        x = torch.cat(sides, -1)
        if depth + 1 < layer.num_layers:
            x = F.dropout(x, layer.dropout, layer.training)
    lasts = torch.stack(found, 1)
    return x if layer.batch_first else x.transpose(0, 1), tuple(lasts.unbind(0)) if cell == "lstm" else lasts[0]


# ---------------------------------------------------------------- step by step


def step(cell: str, gates: tuple[Tensor, ...], own: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The next states, and what the backward wants of the gates; `gates` have the input's part, `own` the state's."""
    if cell == "gru":
        r, z = torch.sigmoid(gates[0] + own[0]), torch.sigmoid(gates[1] + own[1])
        n = torch.tanh(gates[2] + r * own[2])
        return (n + z * (state[0] - n),), (r, z, n, own[2])
    i, f, g, o = (a + b for a, b in zip(gates, own, strict=True))
    if cell == "lstm":
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        c = f * state[1] + i * g
        return (o * torch.tanh(c), c), (i, f, g, o)
    forget = F.logsigmoid(f) + state[3]
    m = torch.maximum(i, forget)
    enter, stay = torch.exp(i - m), torch.exp(forget - m)
    c, n = stay * state[1] + enter * torch.tanh(g), stay * state[2] + enter
    return (torch.sigmoid(o) * c / n, c, n, m), (i, f, g, o)


def step_backward(
    cell: str, up: tuple[Tensor, ...], gates: tuple[Tensor, ...], before: tuple[Tensor, ...], after: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor | None]:
    """From gradients of the states after a step: of its gates, of the states before it but for what the product adds to h, and of
    GRU's third recurrent product."""
    if cell == "gru":
        (dh,), (r, z, n, own) = up, gates
        dn = dh * (1 - z) * (1 - n * n)
        return (dn * own * r * (1 - r), dh * (before[0] - n) * z * (1 - z), dn), (dh * z,), dn * r
    i, f, g, o = gates
    if cell == "lstm":
        dh, dc = up
        bent = torch.tanh(after[1])
        dc = dc + dh * o * (1 - bent * bent)
        each = (dc * g * i * (1 - i), dc * before[1] * f * (1 - f), dc * i * (1 - g * g), dh * bent * o * (1 - o))
        return each, (torch.zeros_like(dh), dc * f), None
    dh, dc, dn, dm = up
    _, c, n, m = after
    forget = F.logsigmoid(f) + before[3]
    enter, stay, z, o = torch.exp(i - m), torch.exp(forget - m), torch.tanh(g), torch.sigmoid(o)
    dc, dn = dc + dh * o / n, dn - dh * o * c / (n * n)
    denter, dstay = (dc * z + dn) * enter, (dc * before[1] + dn * before[2]) * stay
    dm = dm - denter - dstay
    entered = i >= forget
    di, dstay = denter + torch.where(entered, dm, 0.0), dstay + torch.where(entered, 0.0, dm)
    each = (di, dstay * torch.sigmoid(-f), dc * enter * (1 - z * z), dh * c / n * o * (1 - o))
    return each, (torch.zeros_like(dh), dc * stay, dn * stay, dstay), None


def by_steps(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, cell: str, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A loop over time; heads come first, so that a step is one batched product."""
    wide, count = wider(x.dtype), CELLS[cell]
    batch, time, _, heads, size = x.shape
    steps = x.permute(1, 3, 0, 2, 4).to(wide)
    into = weight.permute(1, 3, 0, 2).reshape(heads, size, count * size).to(wide)
    add = bias.transpose(0, 1).reshape(heads, 1, count * size).to(wide)
    now = tuple(one.transpose(0, 1) for one in state.to(wide))
    outs, gates = [], []
    states: list[Tensor] = []
    for at in range(time):
        own = torch.baddbmm(add, now[0], into).view(heads, batch, count, size)
        now, kept = step(cell, steps[at].unbind(2), own.unbind(2), now)
        outs.append(now[0])
        if keep:
            gates.append(torch.stack(kept, 2))
            states.extend(now[1:])
    shape = (heads, batch, size)
    out = torch.stack(outs) if outs else x.new_empty(0, *shape)
    last = torch.stack(now).transpose(1, 2).contiguous()
    out = out.permute(2, 0, 1, 3).to(x.dtype).contiguous()
    if not keep:
        return out, last, x.new_empty(0), x.new_empty(0)
    kept_dtype = wide if cell == "slstm" else x.dtype
    all_gates = torch.stack(gates) if gates else x.new_empty(0, heads, batch, KEPT_GATES, size)
    all_states = torch.stack(states) if states else x.new_empty(0, *shape, dtype=wide)
    all_states = all_states.view(time, STATES[cell] - 1, *shape)
    return out, last, all_gates.permute(2, 0, 3, 1, 4).to(kept_dtype).contiguous(), all_states.permute(1, 3, 0, 2, 4).contiguous()


def by_steps_backward(
    dout: Tensor, dlast: Tensor, weight: Tensor, state: Tensor, out: Tensor, gates: Tensor, states: Tensor, cell: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, of the first states, and of GRU's third recurrent product."""
    wide, count = wider(out.dtype), CELLS[cell]
    batch, time, heads, size = out.shape
    back = weight.permute(1, 0, 2, 3).reshape(heads, count * size, size).to(wide)
    hidden, kept = out.permute(1, 2, 0, 3).to(wide), gates.permute(1, 3, 0, 2, 4).to(wide)
    inner = states.permute(2, 0, 3, 1, 4)
    first = tuple(one.transpose(0, 1) for one in state.to(wide))
    douts = dout.permute(1, 2, 0, 3).to(wide)
    up = tuple(one.transpose(0, 1) for one in dlast.to(wide))
    found, extra = [], []
    for at in reversed(range(time)):
        before = (hidden[at - 1], *inner[at - 1].unbind(0)) if at else first
        each, down, third = step_backward(
            cell, (up[0] + douts[at], *up[1:]), kept[at].unbind(2), before, (hidden[at], *inner[at].unbind(0))
        )
        found.append(torch.stack(each, 2))
        own = torch.stack((*each[:2], third), 2) if third is not None else found[-1]
        up = (down[0] + torch.bmm(own.flatten(2), back), *down[1:])
        if third is not None:
            extra.append(third)
    dx = torch.stack(found[::-1]) if found else out.new_empty(0, heads, batch, count, size)
    dthird = torch.stack(extra[::-1]).permute(2, 0, 1, 3) if extra else out.new_empty(0)
    return dx.permute(2, 0, 3, 1, 4).to(out.dtype).contiguous(), torch.stack(up).transpose(1, 2).contiguous(), dthird.to(out.dtype).contiguous()


# ---------------------------------------------------------------- ops


def _fake(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, cell: str, keep: bool) -> tuple[Tensor, ...]:
    batch, time, _, heads, size = x.shape
    out, wide = x.new_empty(batch, time, heads, size), wider(x.dtype)
    last = state.new_empty(state.shape, dtype=wide)
    if not keep:
        return out, last, x.new_empty(0), x.new_empty(0)
    gates = x.new_empty(batch, time, KEPT_GATES, heads, size, dtype=wide if cell == "slstm" else x.dtype)
    return out, last, gates, x.new_empty(STATES[cell] - 1, batch, time, heads, size, dtype=wide)


def _fake_backward(
    dout: Tensor, dlast: Tensor, weight: Tensor, state: Tensor, out: Tensor, gates: Tensor, states: Tensor, cell: str
) -> tuple[Tensor, ...]:
    batch, time, heads, size = out.shape
    third = out.new_empty(out.shape if cell == "gru" and time else (0,))
    return out.new_empty(batch, time, CELLS[cell], heads, size), torch.empty_like(dlast), third


_recurrent = define(
    "recurrent", "(Tensor x, Tensor weight, Tensor bias, Tensor state, str cell, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
    plain=by_steps, triton="recurrent.forward", fake=_fake,
)  # fmt: skip
_recurrent_backward = define(
    "recurrent_backward",
    "(Tensor dout, Tensor dlast, Tensor weight, Tensor state, Tensor out, Tensor gates, Tensor states, str cell) -> (Tensor, Tensor, Tensor)",
    plain=by_steps_backward, triton="recurrent.backward", fake=_fake_backward,
)  # fmt: skip


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, state, ctx.cell, _ = inputs
    out, _, gates, states = output
    ctx.mark_non_differentiable(gates, states)
    ctx.save_for_backward(weight, state, out, gates, states)


def _gradient(ctx: Any, dout: Tensor, dlast: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, state, out, gates, states = ctx.saved_tensors
    dx, dstate, dthird = _recurrent_backward(dout.contiguous(), dlast.contiguous(), weight, state, out, gates, states, ctx.cell)
    own = torch.cat([dx[:, :, :2], dthird.unsqueeze(2)], 2) if ctx.cell == "gru" and dthird.numel() else dx
    dweight = dbias = None
    if ctx.needs_input_grad[1]:
        before = torch.cat([state[0].to(out.dtype).unsqueeze(1), out[:, :-1]], 1)[:, : out.shape[1]]
        dweight = torch.einsum("btghd,bthe->ghde", own, before).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        dbias = own.sum((0, 1), dtype=wider(own.dtype)).to(weight.dtype)
    return dx, dweight, dbias, dstate if ctx.needs_input_grad[3] else None, None, None


differentiate("recurrent", _context, _gradient)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cell: str) -> None:
    if cell not in CELLS:
        raise UserError(f"cell '{cell}' is not known", f"one of {', '.join(CELLS)}")
    if x.dim() != 5 or x.shape[2] != CELLS[cell]:
        raise UserError(f"x is {tuple(x.shape)} for '{cell}'", f"(batch, time, {CELLS[cell]}, heads, size)")
    batch, _, gates, heads, size = x.shape
    wanted = {"weight": (gates, heads, size, size), "bias": (gates, heads, size), "state": (STATES[cell], batch, heads, size)}
    for name, given in (("weight", weight), ("bias", bias), ("state", state)):
        if given is not None and tuple(given.shape) != wanted[name]:
            raise UserError(f"{name} is {tuple(given.shape)}, x {tuple(x.shape)}", f"{name} of shape {wanted[name]}")
