"""Recurrent layers against torch.nn, against a plain loop, and against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.kernels.papers.recurrent import CELLS, STATES, recurrent, run_layer

CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")
"""Of opcheck; torch.compile does the rest."""
DEEP = {"num_layers": 2, "bidirectional": True, "batch_first": True}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("how", [{}, {"bias": False, "batch_first": True}, DEEP])
@pytest.mark.parametrize("begun", [False, True])
def test_layers_are_those_of_torch(kind: type[nn.LSTM] | type[nn.GRU], how: dict[str, Any], begun: bool) -> None:
    torch.manual_seed(0)
    layer = kind(7, 12, **how).double()
    x = torch.randn(5, 9, 7, dtype=torch.float64, requires_grad=True)
    batch = 5 if how.get("batch_first") else 9
    hx: Any = None
    if begun:
        hx = tuple(torch.randn(4 if how is DEEP else 1, batch, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
        hx = hx if kind is nn.LSTM else hx[0]
    leaves = [x, *layer.parameters(), *((hx if kind is nn.LSTM else [hx]) if begun else [])]
    wants, got = [], []
    for found, into in ((layer(x, hx), wants), (run_layer(layer, x, hx), got)):
        results = [found[0], *(found[1] if kind is nn.LSTM else [found[1]])]
        total = sum((one * torch.linspace(0, 1, one.numel(), dtype=one.dtype).view(one.shape)).sum() for one in results)
        into += [*results, *torch.autograd.grad(total, leaves)]
    for want, have in zip(wants, got, strict=True):
        torch.testing.assert_close(have, want, atol=1e-12, rtol=1e-10)


def plain(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, cell: str) -> tuple[Tensor, Tensor]:
    """As the formulas are written, head by head."""
    outs = []
    for head in range(x.shape[3]):
        now = [one[:, head] for one in state]
        steps = []
        for at in range(x.shape[1]):
            own = [now[0] @ weight[g, head].T + bias[g, head] for g in range(CELLS[cell])]
            a = [x[:, at, g, head] for g in range(CELLS[cell])]
            if cell == "gru":
                r, z = torch.sigmoid(a[0] + own[0]), torch.sigmoid(a[1] + own[1])
                n = torch.tanh(a[2] + r * own[2])
                now = [(1 - z) * n + z * now[0]]
            elif cell == "lstm":
                i, f, g, o = (one + other for one, other in zip(a, own, strict=True))
                c = torch.sigmoid(f) * now[1] + torch.sigmoid(i) * torch.tanh(g)
                now = [torch.sigmoid(o) * torch.tanh(c), c]
            else:  # without a stabiliser: exponentials as they are
                i, f, z, o = (one + other for one, other in zip(a, own, strict=True))
                c, n = (torch.sigmoid(f) * now[k] + torch.exp(i) * (torch.tanh(z) if k == 1 else 1) for k in (1, 2))
                now = [torch.sigmoid(o) * c / n, c, n, now[3]]
            steps.append(now[0])
        outs.append(torch.stack(steps, 1))
    return torch.stack(outs, 2), torch.stack(now)


def given(cell: str, dtype: torch.dtype = torch.float64, batch: int = 3, time: int = 5, heads: int = 2, size: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    gates = CELLS[cell]
    shapes = [(batch, time, gates, heads, size), (gates, heads, size, size), (gates, heads, size), (STATES[cell], batch, heads, size)]
    x, weight, bias, state = (torch.randn(shape, dtype=dtype) for shape in shapes)
    if cell == "slstm":
        state[2] = 1 + state[2].abs()
    return [one.requires_grad_() for one in (x, weight, bias, state)]


@pytest.mark.parametrize("cell", CELLS)
def test_heads_against_a_plain_loop(cell: str) -> None:
    leaves = given(cell)
    if cell == "slstm":
        leaves[3].data[3] = 0.0
    got, want = (fn(*leaves[:2], *leaves[2:], **{"cell": cell}) for fn in (recurrent, plain))
    torch.testing.assert_close(got[0], want[0], atol=1e-12, rtol=1e-10)
    weights = torch.randn_like(got[0])
    pairs = zip(*(torch.autograd.grad((one[0] * weights).sum(), leaves[:3]) for one in (got, want)), strict=True)
    for have, like in pairs:
        torch.testing.assert_close(have, like, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_are_finite_differences(cell: str) -> None:
    """Those of the last states, and of the first, among them."""
    assert torch.autograd.gradcheck(lambda *some: recurrent(*some, cell=cell), given(cell, batch=2, time=3, size=2))


@pytest.mark.parametrize("cell", CELLS)
def test_a_sequence_in_two_pieces(cell: str) -> None:
    x, weight, bias, _ = given(cell)
    whole = recurrent(x, weight, bias, cell=cell)
    first = recurrent(x[:, :2], weight, bias, cell=cell)
    second = recurrent(x[:, 2:], weight, bias, first[1], cell=cell)
    torch.testing.assert_close(torch.cat([first[0], second[0]], 1), whole[0])
    torch.testing.assert_close(second[1], whole[1])
    grads = [torch.autograd.grad((one**2).sum(), weight)[0] for one in (torch.cat([first[0], second[0]], 1), whole[0])]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("size", [800.0, -800.0])
def test_exponential_gates_do_not_overflow(size: float) -> None:
    x, weight, bias, _ = given("slstm", torch.float32)
    x = (x.detach() + size * torch.tensor([1.0, 0, 0, 0]).view(1, 1, 4, 1, 1)).requires_grad_()
    out, last = recurrent(x, weight, bias, cell="slstm")
    out.square().sum().backward()
    assert out.isfinite().all() and last.isfinite().all() and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("cell", ["gru"])
def test_the_op_is_a_torch_op(cell: str) -> None:
    """GRU, which has one result more for its backward."""
    x, weight, bias, state = given(cell, batch=2, time=3)
    torch.library.opcheck(torch.ops.foretell_kernels.recurrent.default, (x, weight, bias, state, cell, True), test_utils=CHECKS)
    compiled = torch.compile(lambda *some: recurrent(*some, cell=cell)[0], backend="aot_eager", fullgraph=True)
    want = torch.autograd.grad(recurrent(x, weight, bias, state, cell=cell)[0].sum(), (x, weight))
    have = torch.autograd.grad(compiled(x, weight, bias, state).sum(), (x, weight))
    torch.testing.assert_close(have, want)


def test_nothing_is_kept_without_gradients() -> None:
    x, weight, bias, state = (one.detach() for one in given("lstm"))
    _, _, gates, states = torch.ops.foretell_kernels.recurrent(x, weight, bias, state, "lstm", False)
    assert gates.numel() == states.numel() == 0


def test_bad_input() -> None:
    x, weight, bias, state = given("lstm")
    with pytest.raises(UserError, match="'rnn' is not known"):
        recurrent(x, weight, cell="rnn")
    with pytest.raises(UserError, match="for 'gru'"):
        recurrent(x, weight, cell="gru")
    with pytest.raises(UserError, match="weight is"):
        recurrent(x, weight[:, :1], cell="lstm")
    with pytest.raises(UserError, match="state is"):
        recurrent(x, weight, bias, state[:1], cell="lstm")
    with pytest.raises(UserError, match="without projection"):
        run_layer(nn.LSTM(4, 8, proj_size=2), torch.zeros(1, 1, 4))
