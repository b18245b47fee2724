"""Which ops and dtypes a step has on CUDA: autocast's tables, the weights it remembers, norms of unlike dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import ModelError
from foretell.trace.cuda.select import cuda_choices
from foretell.trace.record.recorder import Recorder


@contextmanager
def as_cuda(release: str = torch.__version__) -> Iterator[None]:
    recorder = Recorder()
    with recorder, cuda_choices(recorder, (9, 0), release), torch.autocast("cpu", torch.bfloat16):
        yield


def low(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


def wide(*shape: int) -> Tensor:
    return torch.ones(*shape)


TO_FP32: dict[str, Callable[[], Tensor]] = {
    "softmax": lambda: F.softmax(low(4, 8), -1),
    "log_softmax": lambda: F.log_softmax(low(4, 8), -1),
    "layer_norm": lambda: F.layer_norm(low(4, 8), (8,), low(8), low(8)),
    "group_norm": lambda: F.group_norm(low(4, 8, 2), 2),
    "sum": lambda: low(4, 8).sum(),
    "sum of a dimension": lambda: low(4, 8).sum(-1),
    "cumsum": lambda: low(4, 8).cumsum(0),
    "prod": lambda: low(4, 8).prod(),
    "exp": lambda: low(4).exp(),
    "log": lambda: low(4).log(),
    "rsqrt": lambda: low(4).rsqrt(),
    "pow": lambda: low(4).pow(2),
    "norm": lambda: torch.linalg.vector_norm(low(4, 8)),
    "cross_entropy": lambda: F.cross_entropy(low(4, 8), torch.zeros(4, dtype=torch.int64)),
    "mse_loss": lambda: F.mse_loss(low(4), low(4)),
    "l1_loss": lambda: F.l1_loss(low(4), low(4)),
    "kl_div": lambda: F.kl_div(low(4), low(4), reduction="batchmean"),
    "binary cross entropy with logits": lambda: F.binary_cross_entropy_with_logits(low(4), low(4)),
    "cosine_similarity": lambda: F.cosine_similarity(low(4, 8), low(4, 8)),
    "softplus": lambda: F.softplus(low(4)),
    "cdist": lambda: torch.cdist(low(4, 8), low(4, 8)),
    "interpolate": lambda: F.interpolate(low(1, 2, 4, 4), scale_factor=2),
    "cat of two dtypes": lambda: torch.cat([low(4), wide(4)]),
    "stack of two dtypes": lambda: torch.stack([low(4), wide(4)]),
    "addcmul of two dtypes": lambda: torch.addcmul(wide(4), low(4), low(4)),
    "embedding": lambda: F.embedding(torch.zeros(4, dtype=torch.int64), wide(8, 8)),
    "add of two dtypes": lambda: low(4) + wide(4),
}
TO_BF16: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(wide(4, 8), wide(8, 8), wide(8)),
    "matmul": lambda: wide(4, 8) @ wide(8, 4),
    "bmm": lambda: torch.bmm(wide(2, 4, 8), wide(2, 8, 4)),
    "baddbmm": lambda: torch.baddbmm(wide(2, 4, 4), wide(2, 4, 8), wide(2, 8, 4)),
    "einsum": lambda: torch.einsum("ij,jk->ik", wide(4, 8), wide(8, 4)),
    "conv2d": lambda: F.conv2d(wide(1, 2, 4, 4), wide(2, 2, 3, 3)),
    "conv_transpose2d": lambda: F.conv_transpose2d(wide(1, 2, 4, 4), wide(2, 2, 3, 3)),
    "prelu": lambda: F.prelu(wide(4, 8), wide(1)),
    "attention": lambda: F.scaled_dot_product_attention(wide(1, 2, 16, 8), wide(1, 2, 16, 8), wide(1, 2, 16, 8)),
    "cat": lambda: torch.cat([low(4), low(4)]),
    "gelu": lambda: F.gelu(low(4)),
    "silu": lambda: F.silu(low(4)),
    "mean": lambda: low(4, 8).mean(),
    "dropout": lambda: F.dropout(low(4, 8)),
    "max": lambda: low(4, 8).amax(-1),
    "batch_norm": lambda: F.batch_norm(low(4, 8, 2, 2), wide(8), wide(8), wide(8), wide(8), training=True),
    "relu": lambda: F.relu(low(4)),
}


@pytest.mark.parametrize(("table", "dtype"), [(TO_FP32, torch.float32), (TO_BF16, torch.bfloat16)], ids=["fp32", "bf16"])
def test_autocast_results_are_those_torch_documents_for_cuda(table: dict, dtype: torch.dtype) -> None:
    with as_cuda():
        results = {name: compute().dtype for name, compute in table.items()}
    assert results == dict.fromkeys(table, dtype)


def test_autocast_remembers_a_weight_until_its_context_ends() -> None:
    model, recorder = nn.Linear(8, 8, bias=False), Recorder()
    with recorder, cuda_choices(recorder, (9, 0), torch.__version__):
        weight, x = nn.Parameter(torch.empty(8, 8)), torch.empty(4, 8)
        with recorder.program("run"):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    F.linear(F.linear(x, weight), weight)
    del model
    casts = [row for row in recorder.programs["run"] if row.name == "aten._to_copy.default"]
    assert [row.outputs[0].spec.shape for row in casts] == [(8, 8), (4, 8)] * 2


def test_autocast_remembers_a_weight_with_its_gradient_though_a_pass_without_saw_it_first() -> None:
    with as_cuda():
        weight, x = nn.Parameter(torch.empty(8, 8)), torch.empty(4, 8)
        with torch.no_grad():
            assert not F.linear(x, weight).requires_grad
        assert F.linear(x, weight).requires_grad


class Names(TorchDispatchMode):
    """Names of the ops that reach the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_cpu_is_itself_again_afterwards() -> None:
    """Real CPU ops, their names and dtypes, before and after CUDA's choices were open."""
    q = torch.randn(1, 2, 16, 8)
    lstm = nn.LSTM(8, 8)

    def behaviour() -> tuple[list[str], dict[str, torch.dtype]]:
        with Names() as names:
            F.dropout(torch.ones(4, 8), 0.5)
            F.softmax(torch.ones(4, 8), -1)
            F.rms_norm(torch.ones(4, 8), (8,))
            F.batch_norm(torch.ones(4, 8), torch.zeros(8), torch.ones(8), training=True)
            F.scaled_dot_product_attention(q, q, q)
            F.one_hot(torch.zeros(4, dtype=torch.int64), 4)
            lstm(torch.ones(2, 1, 8))
        with torch.autocast("cpu", torch.bfloat16):
            both = {**TO_FP32, **TO_BF16}
            return names.seen, {name: compute().dtype for name, compute in both.items()}

    before = behaviour()
    with as_cuda():
        inside = {name: compute().dtype for name, compute in {**TO_FP32, **TO_BF16}.items()}
    after = behaviour()
    assert after == before
    assert before[1]["layer_norm"] == torch.bfloat16 != inside["layer_norm"]
    assert "aten.native_dropout.default" not in before[0]
    with pytest.raises(ModelError), as_cuda():
        raise ModelError("anything", "")
    assert behaviour() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_rms_norm_of_unlike_dtypes_runs_op_by_op(dtype: torch.dtype) -> None:
    """As torch itself does it: forward and backward, names and dtypes; like dtypes have one kernel each way."""

    def ran() -> tuple[list[str], torch.dtype]:
        x, weight = torch.ones(4, 8, dtype=dtype).requires_grad_(), torch.ones(8).requires_grad_()
        with Names() as names:
            y = F.rms_norm(x, (8,), weight, 1e-5)
            y.backward(torch.ones_like(y))
        return [name for name in names.seen if name.startswith("aten.") and "detach" not in name], y.dtype

    plain, result = ran()
    recorder = Recorder()
    with recorder, cuda_choices(recorder, (9, 0), torch.__version__):
        inside, kept = ran()
    if dtype is torch.bfloat16:
        assert inside == plain and "aten.rsqrt.default" in inside and kept == result == torch.bfloat16
    else:
        assert "aten.rsqrt.default" not in inside and kept == torch.float32
