"""What is kept of fake ops: the traces and tensors that torch's own way gives, and another key for whatever may change a result."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record import fake_cache
from foretell.trace.record.capture import capture
from foretell.trace.record.fake_cache import QuickFakes
from foretell.trace.store import file

ADD = torch.ops.aten.add.Tensor


def key(mode: QuickFakes, *args: Any, **kwargs: Any) -> Any:
    return mode._key(ADD, args, kwargs)


def test_they_are_used_with_this_torch() -> None:
    assert fake_cache.is_known(), "torch keeps what ops give otherwise now: read foretell/trace/record/fake_cache.py again"


@pytest.mark.parametrize(("model", "recipe"), [
    ("gpt-tiny", {"accumulate": 2, "clip": 1.0}),
    pytest.param("resnet-tiny", {"optimizer": "adamw-foreach"}, marks=pytest.mark.slow(reason="another model; keys are of single ops")),
])
def test_a_trace_is_the_one_of_torchs_own_cache(model: str, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> str:
        FakeTensorMode.cache_clear()
        return file.dumps(capture(lambda: load(Source(model=model, micro_batch=2)), Recipe(**recipe)))

    quick = traced()
    monkeypatch.setattr(fake_cache, "is_known", lambda: False)
    assert traced() == quick


def test_whatever_may_change_a_result_changes_the_key() -> None:
    with QuickFakes() as mode:
        whole, wide = torch.empty(8, 8), torch.empty(4, 16)
        tensors = [
            whole, whole.t(), whole[:4], whole[4:], wide, wide[:, ::2], torch.empty(4, 8), whole.double(), whole.int(),
            torch.empty(8, 8, device="meta"), torch.empty(8, 8, requires_grad=True), whole.cfloat(), whole.cfloat().conj(),
            torch._neg_view(whole), torch.empty(64), torch.empty(8, 8, 1), torch.empty(0),
        ]  # fmt: skip
        arguments: list[tuple[Any, ...]] = [(one,) for one in tensors]
        arguments += [(whole, whole), ([whole],), ((whole,),), ([whole, whole],), ([whole], whole), (whole, 1), (whole, 1.0), (whole, True)]
        arguments += [(whole, None), (whole, "1"), (whole, torch.float32), (whole, torch.device("cpu")), (whole, [1]), (whole, (1,)), ()]
        keys = [key(mode, *one) for one in arguments] + [key(mode, whole, alpha=1), key(mode, whole, alpha=2), key(mode, alpha=1), key(mode, beta=1)]
        for (one, first), (other, second) in itertools.combinations(enumerate(keys), 2):
            assert first != second, (one, other)
        assert key(mode, torch.empty(8, 8), 1) == key(mode, whole, 1) and key(mode, whole, alpha=1) == key(mode, torch.empty(8, 8), alpha=1)


def test_what_torch_does_not_look_up_is_not_looked_up() -> None:
    with QuickFakes() as other:
        foreign = torch.empty(2)
    with QuickFakes() as mode:
        constant = torch.tensor(1.0)
        assert other is not mode and constant.constant is not None  # type: ignore[attr-defined]
        for argument in (foreign, constant, lambda: None, torch.zeros(2, 2).to_sparse()):
            assert key(mode, argument) is None and key(mode, [argument]) is None and key(mode, one=argument) is None


def test_tensors_are_those_that_torch_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen for the first time, for the second, and by torch alone: views, what is written in place, tuples, None, other dtypes."""

    def made(mode: FakeTensorMode) -> list[Any]:
        with mode:
            one, weight = torch.empty(4, 6, requires_grad=True), torch.empty(6, 6, dtype=torch.bfloat16)
            part, conjugate = one.detach()[1:, ::2], torch.empty(2, 3, dtype=torch.cfloat).conj()
            outputs = [
                one @ one.t(), part, part.add_(1), one.relu(), *one.detach().split(2), weight.float(), *part.max(0), conjugate, conjugate.mul(2),
                torch._neg_view(weight).t(), *torch.ops.aten.native_layer_norm(one, [6], None, None, 1e-5), one.view(-1), one.expand(2, 4, 6),
                *torch.ops.aten.native_layer_norm_backward(one, one, [6], one[:, :1], one[:, :1], None, None, [True, False, False]),
                torch.empty(3, device="meta") * 2, one.sum(), torch.arange(3), one.new_zeros(2).to(torch.int64),
                torch.nn.Parameter(weight.detach()) * 1, torch.ops.aten._unsafe_view(weight, [3, 12]), *torch._foreach_add([one, weight], 1.0),
            ]  # fmt: skip
            with torch.inference_mode():
                outputs += [torch.empty(2) + 1, weight.to(torch.float64), weight.reshape(-1), weight.t().reshape(-1), *weight.unbind(1)]
            with torch.no_grad():
                outputs.append(one.t())
        assert outputs[1]._base is not None and outputs[1].untyped_storage()._cdata == outputs[2].untyped_storage()._cdata
        return [said(mode, output) for output in outputs]

    def said(mode: FakeTensorMode, output: Any) -> Any:
        if output is None:
            return None
        own = {name: value for name, value in vars(output).items() if value is not mode}
        bases = output._base is not None and tuple(output._base.shape)
        return (
            type(output), own, tuple(output.shape), output.stride(), output.storage_offset(), output.dtype, output.device, output.layout,
            output.requires_grad, output.is_conj(), output.is_neg(), output.is_inference(), output.untyped_storage().nbytes(), bases,
            output.grad_fn and output.grad_fn.name(), torch._C._dispatch_keys(output), output.is_inference() or output._version, output.is_leaf,
        )  # fmt: skip

    FakeTensorMode.cache_clear()
    first, again = made(QuickFakes()), made(QuickFakes())
    FakeTensorMode.cache_clear()
    monkeypatch.setattr(fake_cache, "is_known", lambda: False)
    assert first == again == made(QuickFakes())
    assert again == made(FakeTensorMode())


def test_what_shares_memory_the_second_time_does_so_the_first_time() -> None:
    """Also where an op's schema does not say it, and torch keeps nothing."""
    FakeTensorMode.cache_clear()
    aten = torch.ops.aten
    for _ in range(3):
        with QuickFakes() as mode, torch.no_grad():
            one = torch.empty(4, 6)
            views = [aten._unsafe_view(one, [24]), *one.unbind(0), *one.split([1, 3]), one.view(6, 4)]
            with torch.inference_mode():
                views += [aten.reshape(one, [24]), aten.contiguous(one)]
                copies = [aten.reshape(one.t(), [24]), aten.contiguous(one.t()), *torch._foreach_mul([one, one], 2.0)]
            kept = mode.cache[mode._key(aten._unsafe_view.default, (one, [24]), None)][1]
            assert isinstance(kept, fake_cache.FakeOutputs), "and is looked up"
        memory = one.untyped_storage()._cdata
        assert {view.untyped_storage()._cdata for view in views} == {memory}
        assert len({copy.untyped_storage()._cdata for copy in copies} | {memory}) == len(copies) + 1


def test_what_changes_its_argument_is_worked_out_each_time() -> None:
    """Its sizes, or a constant that is read later."""
    for _ in range(3):
        with QuickFakes():
            one = torch.empty(2, 3)
            one.t_()
            number = torch.tensor(1)
            number.add_(1)
            assert one.shape == (3, 2) and int(number) == 2
