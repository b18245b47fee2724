"""AdamW in one launch against torch.optim.AdamW, step by step, with clipping, copies, zeros, scales and skipped steps."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.kernels.adamw import adamw_step, refusal, separate_step
from foretell.kernels.kernel import interpreted

SIZES = ((3,), (5, 7), (1,), (0,), (2, 3, 4), (40, 33))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    chance = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=chance).to(dtype)) for size in SIZES]


def optimizer_of(params: list[nn.Parameter], **settings: Any) -> torch.optim.AdamW:
    half = len(params) // 2
    groups = [{"params": params[:half], "lr": 1e-2}, {"params": params[half:], "weight_decay": 0.0, "betas": (0.8, 0.99)}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1, foreach=False, **settings)


def give(params: list[nn.Parameter], step: int, times: float = 1.0, missing: int | None = 2) -> None:
    chance = torch.Generator().manual_seed(100 + step)
    for place, param in enumerate(params):
        drawn = torch.randn(param.shape, generator=chance) * times
        param.grad = None if place == missing and step % 2 else drawn.to(param.dtype)


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for state in optimizer.state_dict()["state"].values() for one in (state["step"], state["exp_avg"], state["exp_avg_sq"])]


def close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    """To the bit in plain torch, to a few units in the last place by the kernel."""
    assert len(mine) == len(theirs) > 0
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype
        if interpreted():
            torch.testing.assert_close(one, other, rtol=4e-6, atol=1e-7)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("maximize", [False, True])
def test_steps_are_torchs(maximize: bool) -> None:
    mine, theirs = parameters(), parameters()
    optimizers = [optimizer_of(params, maximize=maximize) for params in (mine, theirs)]
    for step in range(4):
        for params in (mine, theirs):
            give(params, step)
        assert adamw_step(optimizers[0]) is None
        optimizers[1].step()
        close([p.detach() for p in mine], [p.detach() for p in theirs])
        close(states(optimizers[0]), states(optimizers[1]))


def test_clipping_copies_and_zeros_are_the_separate_ops() -> None:
    mine, theirs = parameters(), parameters()
    optimizers = [optimizer_of(params) for params in (mine, theirs)]
    kept = [{p: torch.zeros_like(p, dtype=torch.bfloat16) for p in params[1:]} for params in (mine, theirs)]
    for step, times in enumerate((1e-3, 1.0, 50.0)):
        for params in (mine, theirs):
            give(params, step, times, missing=None)
        norms = [adamw_step(optimizers[0], max_norm=1.0, copies=kept[0], zero=True)]
        norms.append(torch.nn.utils.clip_grad_norm_(theirs, 1.0))
        optimizers[1].step()
        for param, other in kept[1].items():
            other.copy_(param)
        torch.testing.assert_close(*norms)
        for one, other in zip((*mine, *states(optimizers[0])), (*theirs, *states(optimizers[1])), strict=True):
            torch.testing.assert_close(one, other, rtol=5e-6, atol=1e-7)
        for one in mine:
            assert one.grad is not None and not bool(one.grad.any())
        for param, one in kept[0].items():
            assert interpreted() or torch.equal(one, param.detach().bfloat16())


@pytest.mark.parametrize("how", ["found", "norm"])
def test_a_step_that_is_skipped_changes_nothing_but_zeros(how: str) -> None:
    params = parameters()
    optimizer = optimizer_of(params)
    give(params, 0)
    adamw_step(optimizer)
    before = copy.deepcopy([[p.detach() for p in params], states(optimizer)])
    give(params, 2)
    assert params[0].grad is not None
    params[0].grad[1] = torch.inf
    if how == "found":
        adamw_step(optimizer, found_inf=torch.ones(()), max_norm=1.0, zero=True)
    else:
        norm = adamw_step(optimizer, skip_nonfinite=True, zero=True)
        assert norm is not None and not norm.isfinite()
    for was, now in zip(before, [[p.detach() for p in params], states(optimizer)], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(was, now, strict=True))
    assert all(p.grad is not None and not bool(p.grad.any()) for p in params)
    give(params, 2)
    adamw_step(optimizer, found_inf=torch.zeros(()))
    assert states(optimizer)[0] == 2


def test_a_scaled_loss() -> None:
    """Gradients times 1024: norm, clipping and step are those of the gradients themselves."""
    mine, theirs = parameters(), parameters()
    optimizers = [optimizer_of(params) for params in (mine, theirs)]
    give(mine, 0, 1024.0)
    give(theirs, 0)
    norms = [adamw_step(optimizers[0], max_norm=2.0, scale=torch.tensor([1024.0])), torch.nn.utils.clip_grad_norm_(theirs, 2.0)]
    optimizers[1].step()
    torch.testing.assert_close(*norms)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-6, atol=1e-7)


def test_the_state_dict_is_torchs_both_ways() -> None:
    mine, theirs = parameters(), parameters()
    optimizers = [optimizer_of(params) for params in (mine, theirs)]
    for step in range(6):
        for params in (mine, theirs):
            give(params, step)
        optimizers[1].step()
        (adamw_step if step < 2 or step > 3 else torch.optim.AdamW.step)(optimizers[0])
        fresh = optimizer_of(mine)
        fresh.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        optimizers[0] = fresh
    close([p.detach() for p in mine], [p.detach() for p in theirs])
    close(states(optimizers[0]), states(optimizers[1]))
    assert optimizers[0].state_dict()["param_groups"] == optimizers[1].state_dict()["param_groups"]


def test_formats() -> None:
    """Parameters in 16 bits, states with them: as near to float32 as torch's own steps."""
    if interpreted():
        pytest.skip("the interpreter truncates bfloat16")
    mine, theirs, wide = parameters(torch.bfloat16), parameters(torch.bfloat16), parameters()
    for one, other in zip(wide, mine, strict=True):
        one.data.copy_(other)
    optimizers = [optimizer_of(params) for params in (mine, theirs, wide)]
    for step in range(3):
        for params, optimizer in zip((mine, theirs, wide), optimizers, strict=True):
            give(params, step)
            adamw_step(optimizer) if params is mine else optimizer.step()
    gaps = [sum(float((one.detach().float() - true.detach()).square().sum()) for one, true in zip(params, wide, strict=True)) for params in (mine, theirs)]
    assert gaps[0] <= 4 * gaps[1]


def test_what_is_left_to_torch_takes_the_same_steps() -> None:
    mine, theirs = parameters(), parameters()
    optimizers = [optimizer_of(params, amsgrad=True) for params in (mine, theirs)]
    assert refusal(optimizers[0]) == "it has amsgrad" and "SGD" in refusal(torch.optim.SGD(mine, lr=0.1))
    for params in (mine, theirs):
        give(params, 0, 10.0)
    adamw_step(optimizers[0], max_norm=1.0, zero=True)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    optimizers[1].step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    strange = parameters()
    give(strange, 0)
    strange[5].grad = torch.randn(33, 40).t()
    assert "laid out" in refusal(optimizer_of(strange))


def test_strides_other_than_rows() -> None:
    params = [nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)) for _ in range(2)]
    params[1].data.copy_(params[0].data)
    optimizers = [torch.optim.AdamW([one]) for one in params]
    for one in params:
        one.grad = torch.ones_like(one) * torch.arange(5.0)
    adamw_step(optimizers[0], max_norm=3.0)
    separate_step(optimizers[1], max_norm=3.0)
    torch.testing.assert_close(*params, rtol=5e-6, atol=1e-7)


def test_a_schedule_sees_its_steps() -> None:
    params = parameters()
    optimizer = optimizer_of(params)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    give(params, 0)
    adamw_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_autograd_sees_the_change() -> None:
    (param,) = params = [nn.Parameter(torch.randn(4))]
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    adamw_step(torch.optim.AdamW(params))
    with pytest.raises(RuntimeError, match="in-?place"):
        loss.backward()


@pytest.mark.skipif(interpreted(), reason="the same op, many times slower")
def test_opcheck() -> None:
    some = [[torch.randn(5), torch.randn(2, 3)] for _ in range(3)]
    rest = [[torch.rand(5), torch.rand(2, 3)], [torch.ones(()), torch.ones(())], [torch.zeros(5).bfloat16(), torch.zeros(2, 3).bfloat16()]]
    args = (*some, *rest, torch.tensor(0.5), torch.zeros(()), 1e-3, 0.9, 0.999, 1e-8, 0.1, False, True)
    torch.library.opcheck(torch.ops.foretell_kernels.adamw_.default, args)
    torch.library.opcheck(torch.ops.foretell_kernels.squares.default, (some[0],))
