"""Keys of fake ops: the traces that torch's own give, and another key for whatever may change a result."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, _BypassDispatchCache, _CacheKeyState

from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.fake_cache import QuickKeys
from foretell.trace.store import file

ADD = torch.ops.aten.add.Tensor


def key(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
    return mode._cache_key(_CacheKeyState(None), ADD, args, kwargs)


def test_they_are_used_with_this_torch() -> None:
    assert "_prep_args_for_hash" in vars(QuickKeys), "torch makes its keys otherwise now: read foretell/trace/record/fake_cache.py again"


@pytest.mark.parametrize(("model", "recipe"), [
    ("gpt-tiny", {"accumulate": 2, "clip": 1.0}),
    pytest.param("resnet-tiny", {"optimizer": "adamw-foreach"}, marks=pytest.mark.slow(reason="another model; keys are of single ops")),
])
def test_a_trace_is_the_one_of_torchs_own_keys(model: str, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> str:
        FakeTensorMode.cache_clear()
        return file.dumps(capture(lambda: load(Source(model=model, micro_batch=2)), Recipe(**recipe)))

    quick = traced()
    monkeypatch.delattr(QuickKeys, "_prep_args_for_hash")
    assert traced() == quick


def test_whatever_may_change_a_result_changes_the_key() -> None:
    with QuickKeys() as mode:
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
    with QuickKeys() as other:
        foreign = torch.empty(2)
    with QuickKeys() as mode, pytest.raises(_BypassDispatchCache, match="not our fake"):
        key(mode, foreign)
    assert other is not mode
    with QuickKeys() as mode:
        for argument in (lambda: None, torch.zeros(2, 2).to_sparse()):
            with pytest.raises(_BypassDispatchCache):
                key(mode, argument)
