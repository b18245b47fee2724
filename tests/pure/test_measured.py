"""What kernels were measured to be worth: where one is on, and how it is launched."""

from __future__ import annotations

import torch

from foretell.kernels import catalog, measured
from foretell.kernels.kernel import ShapeBucket


def row(kernel: str, shape: dict[str, int], speedup: float, device: str = "cpu") -> measured.KernelRow:
    return measured.KernelRow(
        kernel=kernel, device=device, dtype="bfloat16", shape=shape, config={"warps": 8}, seconds=1.0, floor_seconds=0.5, baseline="eager",
        baseline_seconds=speedup,
        speedup=speedup, low=speedup, high=speedup, peak_bytes=0, baseline_peak_bytes=0, source="planted",
    )  # fmt: skip


def test_a_kernel_is_on_where_all_declared_shapes_were_won() -> None:
    kernel = catalog.find("rms_norm")
    bucket = kernel.bucket({"rows": 16384, "width": 4096})
    assert isinstance(bucket, ShapeBucket)
    declared = [dict(one) for one in kernel.measured_at if bucket.holds(one)]
    assert len(declared) > 1
    won = tuple(row("rms_norm", one, 1.0) for one in declared)
    assert measured.on_by_default(kernel, "cpu", torch.bfloat16, won) == (bucket,)
    assert measured.on_by_default(kernel, "cpu", torch.bfloat16, won[:-1]) == ()
    assert measured.on_by_default(kernel, "cpu", torch.bfloat16, (*won[:-1], row("rms_norm", declared[-1], 0.99))) == ()
    assert measured.on_by_default(kernel, "another", torch.bfloat16, won) == measured.on_by_default(kernel, "cpu", torch.float16, won) == ()


def test_a_configuration_is_tried_for_a_while() -> None:
    kernel, shape = catalog.find("rms_norm"), {"rows": 16384, "width": 4096}
    plain = measured.config(kernel, shape, torch.device("cpu"))
    with measured.trying("rms_norm", {"warps": 32}):
        assert measured.config(kernel, shape, torch.device("cpu")) == {**plain, "warps": 32}
    assert measured.config(kernel, shape, torch.device("cpu")) == plain


def test_the_shipped_table_names_kernels_that_are_there() -> None:
    assert all(one.kernel in catalog.KERNELS and one.low <= one.speedup <= one.high for one in measured.rows())
