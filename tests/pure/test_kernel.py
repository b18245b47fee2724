"""Training kernels as ops: right against float64, in plain torch and in Triton's interpreter; what autograd, compilers and lists ask of them."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretell.errors import UnknownName
from foretell.kernels import catalog
from foretell.kernels.gated import gated
from foretell.kernels.rms_norm import rms_norm
from foretell.kernels.rows import as_rows, has_rows
from tests.kernel_cases import CPU, MINE, UNITS, Seen, cases, drawn, error, results, shapes_of, worst

ROOT = Path(__file__).resolve().parents[2]
with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MINE)
def test_plain_torch_is_as_near_to_float64_as_eager(name: str, dtype: torch.dtype) -> None:
    kernel = catalog.find(name)
    assert {what: found for what, given in cases(kernel, dtype) if (found := worst(kernel, given, dtype)) > 1} == {}


@pytest.mark.parametrize("name", MINE)
def test_a_gradient_that_is_a_little_wrong_would_be_seen(name: str) -> None:
    kernel = catalog.find(name)
    given = drawn(kernel, shapes_of(kernel)[0], torch.float32)
    for place, one in enumerate(results(kernel.call, kernel, given, torch.float32)):
        wrong = one.detach().clone()
        wrong[(0,) * wrong.dim()] += 1e-3 * wrong.norm()
        right = results(kernel.reference, kernel, given, torch.float64)[place]
        assert error(wrong, right) > 100 * (2 * error(one, right) + UNITS * torch.finfo(torch.float32).eps)


@with_triton
def test_triton_is_as_near_to_float64_as_eager() -> None:
    """Interpreted, in a process of its own: Triton decides when it is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "tests.kernel_cases"], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == set(MINE)
    assert [row for row in rows if not row["worst"] <= 1] == []


@pytest.mark.parametrize("name", MINE)
def test_ops_are_what_torch_asks_of_ops(name: str) -> None:
    kernel = catalog.find(name)
    given = drawn(kernel, shapes_of(kernel)[0], torch.float32)
    with Seen() as seen:
        results(kernel.call, kernel, given, torch.float32)
    forward, backward = (one.name() for one, _ in seen.calls)
    assert backward == f"{forward}_backward"
    for op, arguments in seen.calls:
        torch.library.opcheck(op, arguments)
        if "backward" not in op.name():
            some = tuple(one.requires_grad_() if place in kernel.learned(arguments) else one for place, one in enumerate(arguments))
            torch.library.opcheck(op, some)


def test_the_op_that_writes_over_its_arguments_says_so() -> None:
    torch.library.opcheck(torch.ops.foretell_kernels.gated_backward_.default, (torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 8), "silu"))


@pytest.mark.parametrize("name", MINE)
def test_each_gradient_alone_is_as_with_the_others(name: str) -> None:
    kernel = catalog.find(name)
    given = drawn(kernel, shapes_of(kernel)[0], torch.float32)
    places = kernel.learned(given)
    together = results(kernel.call, kernel, given, torch.float32)[-len(places) :]
    for place, wanted in zip(places, together, strict=True):
        assert torch.equal(results(kernel.call, kernel, given, torch.float32, [place])[-1], wanted)


@pytest.mark.parametrize("name", MINE)
def test_a_result_has_a_gradient_where_the_reference_has_one(name: str) -> None:
    kernel = catalog.find(name)
    given = drawn(kernel, shapes_of(kernel)[0], torch.float32)
    for place in kernel.learned(given):
        made = [results(one, kernel, given, torch.float32, [place])[:-1] for one in (kernel.call, kernel.reference)]
        assert [one.requires_grad for one in made[0]] == [one.requires_grad for one in made[1]]


@pytest.mark.parametrize("name", MINE)
def test_no_rows(name: str) -> None:
    kernel = catalog.find(name)
    given = [one[:0] if isinstance(one, Tensor) and one.dim() > 1 else one for one in drawn(kernel, shapes_of(kernel)[0], torch.float32)]
    wanted = results(kernel.reference, kernel, given, torch.float32)
    assert [torch.equal(one, other) for one, other in zip(results(kernel.call, kernel, given, torch.float32), wanted, strict=True)].count(False) == 0


@pytest.mark.parametrize("name", MINE)
def test_a_second_derivative_is_refused(name: str) -> None:
    kernel = catalog.find(name)
    given = drawn(kernel, shapes_of(kernel)[0], torch.float32)
    given[0] = given[0].detach().requires_grad_()
    made = kernel.call(*given)
    made = made[-1] if isinstance(made, tuple) and name != "rotary" else made[0] if isinstance(made, tuple) else made
    (slope,) = torch.autograd.grad(made.square().sum(), given[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        slope.sum().backward()


@pytest.mark.parametrize("name", MINE)
def test_what_is_moved_and_kept_is_what_is_stated(name: str) -> None:
    """Everything the ops are given and give, once: the least there is to move. Angles, weights and what is small are not in it."""
    kernel = catalog.find(name)
    shape = {**shapes_of(kernel)[0], "width": 256}
    given = drawn(kernel, shape, torch.bfloat16)
    with Seen() as seen:
        results(kernel.call, kernel, given, torch.bfloat16)
    large = given[0].numel() // 4
    moved = 0
    for op, arguments in seen.calls:
        answer = op(*arguments)
        tensors = [one for one in (*arguments, *(answer if isinstance(answer, tuple) else (answer,))) if isinstance(one, Tensor)]
        moved += sum(one.nbytes for one in tensors if one.dim() > 1 and one.numel() > large and one.dim() == given[0].dim())
    assert moved == kernel.floor_bytes(shape, 2)
    kept: list[Tensor] = []
    ours = {one.data_ptr() for one in given if isinstance(one, Tensor)}
    places = kernel.learned(given)
    some = [one.requires_grad_() if place in places else one for place, one in enumerate(given)]
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        made = kernel.call(*some)
    ours |= {one.data_ptr() for one in (made if isinstance(made, tuple) else (made,))}
    assert sum(one.nbytes for one in kept if one.data_ptr() not in ours) == kernel.saved_bytes(shape, 2)


# ---------------------------------------------------------------- writing over gate and up


def gate_and_up() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    return x * 2, y * 3


def test_gradients_take_the_places_of_gate_and_up() -> None:
    gate, up = gate_and_up()
    wanted = torch.autograd.grad(gated(gate, up, "silu").sum(), (gate, up))
    places = gate.data_ptr(), up.data_ptr()
    found = torch.autograd.grad(gated(gate, up, "silu", True).sum(), (gate, up))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert tuple(one.data_ptr() for one in found) == places


def test_whoever_kept_gate_is_refused_and_never_wrong() -> None:
    gate, up = gate_and_up()
    other = gate.square()  # keeps gate
    total = other.sum() + gated(gate, up, "silu", True).sum() * 2
    gated(gate, up, "silu", True).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


# ---------------------------------------------------------------- rows, lists


def test_rows_are_seen_in_strides() -> None:
    x = torch.randn(2, 3, 8)
    assert has_rows(x) and has_rows(x[..., :4]) and has_rows(x[:, :, ::1]) and not has_rows(x.transpose(0, 1)) and not has_rows(x[..., ::2])
    assert as_rows(x[..., :4]).data_ptr() == x.data_ptr() and as_rows(x.transpose(0, 1)).is_contiguous()


def test_an_unknown_kernel_is_named_with_those_that_are_near() -> None:
    with pytest.raises(UnknownName, match="rms_norm"):
        catalog.find("rms_nrom")


def test_ops_keep_what_they_are_in_a_copy_of_a_graph() -> None:
    compiled = torch.compile(lambda x, w: rms_norm(x, w, 1e-5), backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5):
        x, weight = torch.randn(rows, 8, device=CPU), torch.randn(8)
        assert torch.equal(compiled(x, weight), rms_norm(copy.deepcopy(x), weight, 1e-5))
