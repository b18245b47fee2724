"""What the scratch rules build on: kernels that copy their inputs, reductions, and cuDNN's convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from foretell.hardware.generations import Multiprocessors, reference
from foretell.trace.types import Op, TensorSpec
from foretell.units import DTYPE_BYTES, MIB

Buffers = tuple[int, ...]
"""Sizes in bytes of what is alive together."""


def input_specs(op: Op) -> tuple[TensorSpec, ...]:
    return tuple(ref.spec for ref in op.inputs)


CONTIGUOUS_INPUTS: dict[str, tuple[int, ...]] = {
    "aten.native_layer_norm.default": (0,), "aten.native_layer_norm_backward.default": (0, 1),
    "aten._fused_rms_norm.default": (0,), "aten._fused_rms_norm_backward.default": (0, 1),
    "aten.native_group_norm.default": (0,), "aten.native_group_norm_backward.default": (0, 1),
    "aten._softmax.default": (0,), "aten._log_softmax.default": (0,),
    "aten._softmax_backward_data.default": (0, 1), "aten._log_softmax_backward_data.default": (0, 1),
    "aten.embedding.default": (1,), "aten.embedding_dense_backward.default": (0, 1),
}  # fmt: skip
"""Op → the inputs its kernel makes contiguous before it starts."""

_BLOCK_THREADS, _WARP = 512, 32
_LEAST_PER_THREAD, _MOST_PER_THREAD = 16, 256


def reduction_staging(spec: TensorSpec, dims: frozenset[int], accumulator: int, device: Multiprocessors) -> tuple[int, ...]:
    """ATen's Reduce.cuh for a contiguous input: bytes of partial results and of semaphores; empty if not split.

    Follows setReduceConfig: a block is laid over the fastest dimension, vectors of 4 over the outputs if that
    dimension stays; inputs are split over warps, and over blocks if a thread would still have 256 values or more.
    """
    groups = _groups(spec.shape, dims)
    inputs = prod(size for size, _, gone in groups if gone)
    outputs = prod(size for size, _, gone in groups if not gone)
    if inputs <= 1 or not outputs:
        return ()
    along = groups[-1][2]  # the fastest dimension is reduced
    vector = 1 if along else _vector(groups)
    x, y = (inputs, outputs) if along else (outputs // vector, inputs)
    if along and len(groups) == 1 and x > 128:
        x //= 4
    most = (256 if spec.dtype == "complex128" else _BLOCK_THREADS) // vector
    x, y = _power(min(x, most)), _power(min(y, most))
    width = min(x, _WARP)
    height = min(y, most // width)
    width = min(x, most // height)
    per_thread, per_block = ceil(inputs / width) if along else inputs, 1 if along else width
    if per_thread < min(height * 16, _MOST_PER_THREAD):
        return ()
    per_thread = ceil(per_thread / height)
    grid = ceil(outputs // vector / per_block)
    target = device.multiprocessors * (device.threads // (width * height))
    if per_thread < _MOST_PER_THREAD or grid > target:
        return ()
    blocks = min(ceil(target / grid), ceil(per_thread / _LEAST_PER_THREAD))
    blocks = max(blocks, ceil(per_thread / _MOST_PER_THREAD))
    if blocks <= 1:
        return ()
    return (accumulator * outputs * blocks * (1 if along else width * vector), 4 * grid)


def _groups(shape: tuple[int, ...], dims: frozenset[int]) -> list[tuple[int, int, bool]]:
    """Neighbouring dimensions with the same fate as one: (size, stride in elements, reduced), slowest first."""
    groups: list[tuple[int, int, bool]] = []
    stride = prod(shape)
    for at, size in enumerate(shape):
        stride //= max(1, size)
        if size == 1:
            continue
        gone = at in dims
        if groups and groups[-1][2] == gone:
            groups[-1] = (groups[-1][0] * size, stride, gone)
        else:
            groups.append((size, stride, gone))
    return groups or [(1, 1, False)]


def _vector(groups: list[tuple[int, int, bool]]) -> int:
    """How many neighbouring outputs a thread loads at once: 4, 2 or 1, as sizes and strides divide."""
    vector = 4
    for number in (groups[-1][0], *(stride for _, stride, _ in groups[:-1])):
        while number % vector:
            vector //= 2
    return vector


def _power(value: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << max(1, value).bit_length() - 1


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class Convolution:
    """One convolution, and what cuDNN 9.19 was measured to take for it on an H200 (workspace and layout copies).

    cuDNN's fast engines want NHWC with channels in multiples of 16 bytes. From NCHW it makes copies of input, output
    and weight: `x`, `y` and `w` below, which is nearly all there is; the rest is fp32 partial sums where it splits a
    long sum over blocks. Which engine it takes is its secret: the thresholds are read by hand off a grid of shapes, and
    `convolutions` says where measured models speak against them.
    """

    def __init__(
        self, source: TensorSpec, weight: TensorSpec, result: TensorSpec, attrs: Sequence[object], backward: bool,
        weight_last: bool = False,
    ) -> None:  # fmt: skip
        self.source, self.weight, self.result, self.backward = source, weight, result, backward
        dims = len(source.shape) - 2
        given = [value for value in attrs if isinstance(value, int)]
        numbers, flags = given[: 4 * dims + 2], given[4 * dims + 2 :]
        known = len(numbers) == 4 * dims + 2
        self.stride = max(numbers[:dims], default=1) if known else 1 + (source.shape[2:] != result.shape[2:])
        self.padding = max(numbers[dims : 2 * dims], default=0) if known else max(weight.shape[2:], default=1) // 2
        self.dilation = max(numbers[2 * dims : 3 * dims], default=1) if known else 1
        self.transposed = known and bool(numbers[3 * dims])
        self.mask = tuple(map(bool, flags[:3])) if backward and len(flags) >= 3 else (True, True, True)
        self.channels_last = bool(flags[-1]) if len(flags) == (4 if backward else 1) else False
        self.channels, self.outputs, self.batch = source.shape[1], result.shape[1], source.shape[0]
        self.groups = numbers[-1] if known else max(1, self.channels // weight.shape[1])
        self.narrow = DTYPE_BYTES[source.dtype] < 4
        self.kernel = max(weight.shape[2:], default=1)
        self.pointwise = self.kernel == 1 and self.stride == 1
        self.depthwise = self.groups > 1 and self.groups in (self.channels, self.outputs)
        self.plane, self.plane_out = prod(source.shape[2:]), prod(result.shape[2:])
        self.few = self.channels <= 4
        padded = round_up(self.channels, 8 if self.narrow else 4) / self.channels
        self.x = int(source.nbytes * padded)
        self.y = result.nbytes
        self.w = int(weight.nbytes * padded) if self.kernel > 1 else 0
        self.weight_copy = weight.nbytes if self.channels_last and not weight_last else 0
        self.weight32 = 4 * weight.numel

    def by_hand(self) -> int:
        """Forward: the workspace. Backward: the highest point of both passes, above the gradients that are returned."""
        if not self.backward:
            return self.data_pass()
        data = self.data_pass() - (self.weight.nbytes if self.mask[1] else 0) if self.mask[0] else 0
        return max(data, self.weight_pass() if self.mask[1] else 0)

    def data_pass(self) -> int:
        """Forward, or the gradient of the input: the same engines, the same copies."""
        if self.depthwise:
            return 0
        if self.pointwise:
            return self._pointwise_data_pass()
        if self.few and self.backward:
            return self.x + self.y + self.w if self.narrow or self.channels_last else 0
        if self.few and self.kernel <= 4 and (self.channels <= 3 or not self.narrow):
            return self.x if self.channels_last else 0
        positions = self.result.shape[0] * prod(self.result.shape[2:])
        depth = self.weight.numel // max(1, self.outputs)
        split = 0
        if self.kernel > 1 and not self.transposed and positions <= (8192 if self.narrow else 32768):
            split = min(8 * MIB, 12 * positions * self.outputs) if depth >= (4096 if self.narrow else 1024) else 0
        if self.channels_last:
            return self.weight_copy + split + (self.x + self.w if self.few else 0)
        return self.x + self.y + self.w + split

    def _pointwise_data_pass(self) -> int:
        """1x1 is a matrix product on the data as it lies, unless rows of a plane are not aligned."""
        if self.channels_last and self.plane > 1:
            return 0
        large = self.channels * self.outputs >= 1 << 19
        if self.plane % 4 == 0 and not (self.narrow and self.plane % 8 and large):
            return 0
        return self.source.nbytes + self.y + (self.weight.nbytes if self.plane == 1 else 0)

    def weight_pass(self) -> int:
        """Gradient of the weight: the copies of the forward pass and fp32 partial sums, one per split of the batch."""
        if self.depthwise:
            return self._depthwise_weight_pass()
        if self.pointwise:
            return self._pointwise_weight_pass()
        if self.few:
            if not self.narrow and self.kernel <= 4 and (not self.channels_last or self.channels <= 3):
                return 0
            sums = 20 if self.narrow and (self.kernel == 4 or self.kernel > 7) else 8
            return self.x + self.w + sums * MIB + (0 if self.narrow and self.channels_last else self.y)
        sums = min(16 * self.weight32, int(8.25 * MIB)) if self.weight32 <= 9 * MIB else 0
        return sums + (self.weight_copy if self.channels_last else self.x + self.y + self.w)

    def _depthwise_weight_pass(self) -> int:
        """In NCHW nothing; in NHWC partial sums, and for 7x7 on large fp32 planes something like eight copies of the input.

        7x7 with 192 channels took them on a plane of 784, with 256 not; 3x3 and 5x5 on none.
        """
        if not self.channels_last:
            return 0
        if self.narrow:
            return 8 * self.batch * self.weight32
        large = self.plane > 1024 or (self.plane > 512 and self.channels < 256)
        return 8 * self.source.nbytes + 13 * MIB if self.kernel >= 7 and large else 0

    def _pointwise_weight_pass(self) -> int:
        """1x1: either one product per sample, fp32, summed afterwards, or copies in NHWC; mostly what is smaller."""
        if self.channels_last and self.plane > 1:
            return min(reference().sm_count * self.weight32, int(8.25 * MIB)) * (1 if self.narrow else 2)
        copies = self.source.nbytes + self.y
        each = self.batch * self.weight32
        if self.plane == 1:
            return copies + self.weight.nbytes
        if self.plane % 4:
            chosen = (self.outputs > self.channels and self.batch < 64) or each <= 8 * MIB
            return max(each, copies) if chosen else copies + (0 if self.narrow else 8 * MIB)
        if not self.narrow and self.plane >= 1 << 14 and max(self.channels, self.outputs) <= 64:
            return copies + 8 * MIB
        return min(each, copies + (2 if self.narrow else 8) * MIB)
