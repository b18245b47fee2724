"""Memory an op takes for itself while it runs, besides its outputs: workspaces, staging buffers, contiguous copies.

    scratch(op, capability)  →  sizes in bytes of the buffers that live at the same time, at the op's own peak

Every rule says where its number comes from. Most follow the launcher's source and are exact; convolutions follow
measurements (cuDNN 9.19 on an H200), because cuDNN chooses among engines by rules it does not tell. Where
measurements scatter, a rule leans to the upper side. An op without a rule needs nothing.

What shapes do not say comes in ``op.attrs``; without it, a rule assumes contiguous tensors and the costlier case:

* convolutions: the numbers the op was called with, and a last True or False: channels_last, of the input;
* reductions: the reduced dimensions, then keepdim; sorts and rolls: their integers; index_put: accumulate;
* any op: ``"strided:2"`` says that input 2 is not contiguous, so that kernels which need it contiguous copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import ceil, prod

from foretell.hardware.generations import Multiprocessors, multiprocessors
from foretell.kernels.names import NAMESPACE, PARTS_PER_SM
from foretell.price.kernels import scratch_attention, scratch_rnn
from foretell.price.kernels.convolutions import workspace
from foretell.price.kernels.scratch_data import (
    CONTIGUOUS_INPUTS,
    Buffers,
    Convolution,
    input_specs,
    reduction_staging,
)
from foretell.trace.fold.merged import MERGED, about
from foretell.trace.types import Op, TensorSpec
from foretell.units import DTYPE_BYTES

Rule = Callable[[Op, Multiprocessors], Buffers]


def scratch(op: Op, capability: tuple[int, int]) -> Buffers:
    """Sizes of the temporaries that are alive together when the op needs most; empty for most ops."""
    return max(stages(op, capability), key=sum, default=())


def stages(op: Op, capability: tuple[int, int]) -> tuple[Buffers, ...]:
    """The temporaries of an op in turn: with several, the n-th comes and goes after the n-th output was made."""
    if op.name == MERGED:
        return (about(op).scratch,)
    rule = _RULES.get(op.name)
    if rule is None:
        found: tuple[Buffers, ...] = ((),)
    elif rule is _convolution_backward:
        found = _convolution_backward_stages(op, multiprocessors(capability))
    elif rule is _recurrent_backward:
        found = scratch_rnn.backward(op)
    else:
        found = (rule(op, multiprocessors(capability)),)
    copies = _copies(op)
    return tuple(tuple(size for size in (*copies, *stage) if size > 0) for stage in found)


def extra_output_bytes(op: Op) -> int:
    """How much larger the outputs' storages are on the device than their shapes say."""
    if op.name == "aten._scaled_dot_product_efficient_attention.default" and len(op.outputs) > 1:
        shape = op.outputs[1].spec.shape  # logsumexp; its rows are padded to 32, which fake tensors know already
        return 4 * prod(shape[:-1]) * (-shape[-1] % 32) if shape else 0
    if op.name in ("aten._unique2.default", "aten.unique_dim.default") and op.inputs and op.outputs:
        return max(0, op.inputs[0].spec.nbytes - op.outputs[0].spec.nbytes)  # cut from a tensor of the input's size
    return 0


def _strided(op: Op) -> set[int]:
    return {int(mark[8:]) for mark in op.attrs if isinstance(mark, str) and mark.startswith("strided:")}


def _copies(op: Op) -> Buffers:
    """Kernels that call .contiguous() on their inputs copy those that are not."""
    needed = CONTIGUOUS_INPUTS.get(op.name, ())
    return tuple(op.inputs[i].spec.nbytes for i in sorted(_strided(op)) if i in needed and i < len(op.inputs))


def _sort_temporary(count: int, element: int) -> int:
    """cub's radix sort: the alternate buffers (element bytes each), tile look-back (1 KiB per tile) and histograms."""
    return count * element + 1024 * ceil(count / 4500) + 20 * 1024


# -- reductions, norms and losses --------------------------------------------------------------------------------------


def _reduction(accumulator: int = 0) -> Rule:
    def rule(op: Op, dev: Multiprocessors) -> Buffers:
        """Reduce.cuh: partial results of the blocks that share an output, and their semaphores."""
        source, result = op.inputs[0].spec, op.outputs[0].spec
        wide = accumulator or max(4, DTYPE_BYTES[source.dtype])
        found = []
        for dims in _reduced_dims(op, source.shape, result.shape):
            found.append(reduction_staging(source, dims, wide, dev))
            if 0 in _strided(op):  # what stays may vary fastest, as channels do in channels_last
                kept = prod(size for i, size in enumerate(source.shape) if i not in dims)
                rows = TensorSpec((source.numel // max(1, kept), kept), source.dtype)
                found.append(reduction_staging(rows, frozenset((0,)), wide, dev))
        return max(found, key=sum, default=())

    return rule


_REDUCED = _reduction()
_LOW = ("bfloat16", "float16")


def _summed(op: Op, dev: Multiprocessors) -> Buffers:
    """ReduceOps.cpp, make_reduction_from_out_ty: what is not of the sum's own dtype is cast first, all of it, but for 16 bits into fp32.

    So the sum of a mask needs eight bytes for each of its elements; that of a max's backward (`scale_grad_by_count`) was seen on an H200.
    """
    source, result = op.inputs[0].spec, op.outputs[0].spec
    if source.dtype == result.dtype or (source.dtype in _LOW and result.dtype == "float32"):
        return _REDUCED(op, dev)
    cast = TensorSpec(source.shape, result.dtype)
    made = replace(op, inputs=(op.inputs[0]._replace(spec=cast), *op.inputs[1:]), attrs=tuple(a for a in op.attrs if a != "strided:0"))
    return (cast.nbytes, *_REDUCED(made, dev))


def _reduced_dims(op: Op, source: Sequence[int], result: Sequence[int]) -> Iterable[frozenset[int]]:
    """The dimensions that went; if attrs do not name them and shapes leave a doubt, every set it can have been."""
    named = [value for value in op.attrs if isinstance(value, int) and not isinstance(value, bool)]
    if named:
        return [frozenset(value % len(source) for value in named)] if source else []
    if len(source) == len(result):
        return [frozenset(i for i, (n, m) in enumerate(zip(source, result, strict=True)) if n != m)]
    kept: list[tuple[int, ...]] = [()]  # which dimensions the result's dimensions can be, in order
    for size in result:
        kept = [(*at, i) for at in kept for i in range(at[-1] + 1 if at else 0, len(source)) if source[i] == size][:64]
    return [frozenset(range(len(source))) - frozenset(at) for at in kept]


def _layer_norm_backward(gradients: int) -> Rule:
    def rule(op: Op, dev: Multiprocessors) -> Buffers:
        """Tall and narrow: partial weight gradients per 32 rows, then a sum over them (layer_norm_kernel.cu)."""
        specs = input_specs(op)
        columns = max((out.spec.numel for out in op.outputs[1:]), default=0)
        if not columns or len(op.outputs) < 2:
            return ()
        rows = specs[1].numel // columns
        if rows <= 64 * 1024 or columns // 32 >= dev.multiprocessors // 2:
            return ()
        partial = TensorSpec((ceil(rows / 32), columns), op.outputs[1].spec.dtype)
        found = reduction_staging(partial, frozenset((0,)), 4, dev)
        return (*(partial.nbytes for _ in range(min(gradients, len(op.outputs) - 1))), 512, *found)

    return rule


def _group_norm(op: Op, _: Multiprocessors) -> Buffers:
    """Scale and shift per sample and channel, in fp32."""
    shape = op.inputs[0].spec.shape
    one = 4 * shape[0] * shape[1]
    return (one, one)


def _group_norm_backward(op: Op, _: Multiprocessors) -> Buffers:
    """ds, db and c1 per sample and channel, c2 and c3 per sample and group, in fp32."""
    shape, groups = op.inputs[1].spec.shape, op.inputs[2].spec.numel
    one = 4 * shape[0] * shape[1]
    return (one, one, one, 4 * groups, 4 * groups)


def _softmax_backward(op: Op, _: Multiprocessors) -> Buffers:
    """The product of gradient and output."""
    return (op.inputs[0].spec.nbytes,)


def _safe_softmax(op: Op, _: Multiprocessors) -> Buffers:
    """Which elements, and then which rows, are all -inf, as booleans; a zero."""
    spec = op.inputs[0].spec
    return (spec.numel, spec.numel // max(1, spec.shape[-1] if spec.shape else 1), 512)


def _input_copy(op: Op, _: Multiprocessors) -> Buffers:
    """One tensor like the first input: c2r FFT overwrites its input, logsumexp and losses hold the elementwise part."""
    return (op.inputs[0].spec.nbytes,)


def _loss(op: Op, _: Multiprocessors) -> Buffers:
    """A reduced loss holds the elementwise losses first."""
    return (max(spec.nbytes for spec in input_specs(op)),) if not op.outputs[0].spec.shape else ()


def _logits_loss(op: Op, _: Multiprocessors) -> Buffers:
    """log(sigmoid) of the logits and the elementwise losses, of which only their mean is an output."""
    one = input_specs(op)[0].nbytes
    return (one, one) if not op.outputs[0].spec.shape else (one,)


def _foreach_norm(op: Op, _: Multiprocessors) -> Buffers:
    """Partial norms: one per 65536 elements of the largest tensor, for every tensor."""
    chunks = max((ceil(spec.numel / 65536) for spec in input_specs(op)), default=0)
    return (len(op.inputs) * chunks * (8 if op.inputs and op.inputs[0].spec.dtype == "float64" else 4),)


def _complex_product(op: Op, _: Multiprocessors) -> Buffers:
    """Complex matrix products: operands that are lazily conjugated or permuted are made real copies first."""
    return tuple(spec.nbytes for spec in input_specs(op)[-2:] if spec.dtype.startswith("complex"))


def _roll(op: Op, _: Multiprocessors) -> Buffers:
    """Rolling several dimensions goes one by one, through one intermediate tensor."""
    return (op.inputs[0].spec.nbytes,) if sum(type(value) is int for value in op.attrs) != 2 else ()


# -- sorting and indexing ----------------------------------------------------------------------------------------------


def _embedding_backward(op: Op, _: Multiprocessors) -> Buffers:
    """Embedding.cu: indices are sorted above 3072, then rows are summed by 10 in fp32 and scattered.

    The partial sums are allocated for the most segments there can be: n / 10 + min(n, table rows).
    """
    grad, indices = input_specs(op)[:2]
    count, (rows, columns) = indices.numel, op.outputs[0].spec.shape
    if count <= 3072:
        return ()
    index = DTYPE_BYTES[indices.dtype]
    segments = min(count, rows)
    partial = count // 10 + segments
    sorting = (index * count, index * count, index * count, _sort_temporary(count, 2 * index))
    summing = (
        index * count, index * count, index * count, 8, 8, index * segments, index * segments, index * partial,
        max(4, DTYPE_BYTES[grad.dtype]) * partial * columns,
    )  # fmt: skip
    return max(sorting, summing, key=sum)


def _sort(op: Op, _: Multiprocessors) -> Buffers:
    """Up to 4096 in a row: an arange. Longer: row numbers, and cub's buffers for keys and values."""
    spec = op.inputs[0].spec
    row = _row(op, spec)
    element = DTYPE_BYTES[spec.dtype]
    if row <= 4096:
        return (8 * row,)
    if row == spec.numel:
        return (8 * row, _sort_temporary(row, element + 8))
    return (8 * spec.numel, 8 * spec.numel, element * spec.numel, _sort_temporary(spec.numel, element + 8))


def _row(op: Op, spec: TensorSpec) -> int:
    """Length of the dimension worked along: the one in attrs, or else the last."""
    dim = next((value for value in op.attrs if isinstance(value, int) and not isinstance(value, bool)), -1)
    return spec.shape[dim] if spec.shape and -len(spec.shape) <= dim < len(spec.shape) else 1


def _topk(op: Op, dev: Multiprocessors) -> Buffers:
    """Long rows: digit counts (512 B) per block and cumulative ones (1 KiB) per row (TensorTopK.cu, several blocks)."""
    spec, result = op.inputs[0].spec, op.outputs[0].spec
    pairs = zip(spec.shape, result.shape, strict=True)
    row = next((n for n, m in pairs if n != m), spec.shape[-1] if spec.shape else 1)
    rows = spec.numel // max(1, row)
    limits = ((20, 20000), (40, 10000), (80, 8000), (200, 5000), (800, 3000), (4000, 800))
    if row < next((least for most, least in limits if rows <= most), 400):
        return ()
    items = min(64, max(4, ceil(spec.numel / (256 * 6 * dev.multiprocessors))))
    return (520 * rows * ceil(row / (256 * items)) + 1056 * rows + 4096,)


def _cumulative(op: Op, _: Multiprocessors) -> Buffers:
    """A scan of one row keeps 16 bytes per tile; another dtype than the output's is cast first."""
    spec, result = op.inputs[0].spec, op.outputs[0].spec
    cast = result.nbytes if spec.dtype != result.dtype else 0
    single = spec.numel == max(spec.shape, default=1)
    return (cast, spec.numel // 190 + 1024 if single else 0)


def _index_put(op: Op, _: Multiprocessors) -> Buffers:
    """Accumulating: linear indices, their sorted order and origin, an arange, and cub's sort buffers."""
    flags = [value for value in op.attrs if isinstance(value, bool)]
    accumulate = flags[0] if flags else op.phase == "backward"
    indices = [spec for spec in input_specs(op)[1:-1] if spec.dtype in _INTEGERS]
    count = prod(_broadcast(indices)) if indices else max((spec.numel for spec in input_specs(op)[1:-1]), default=0)
    if not accumulate or not count:
        return _index_copies(indices)
    values = op.inputs[-1].spec.nbytes if len(op.inputs) - 1 in _strided(op) else 0
    return (8 * count, 8 * count, 8 * count, 8 * count, _sort_temporary(count, 16), values)


_INTEGERS = ("int64", "int32")


def _broadcast(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """The shape that shapes take together."""
    rank = max((len(spec.shape) for spec in specs), default=0)
    padded = [(1,) * (rank - len(spec.shape)) + tuple(spec.shape) for spec in specs]
    return tuple(max(sizes) if min(sizes) else 0 for sizes in zip(*padded, strict=True))


def _index_copies(indices: Sequence[TensorSpec]) -> Buffers:
    """TensorAdvancedIndexing: int32 becomes int64; several of unlike shapes are all laid out at their common one."""
    shape = _broadcast(indices)
    alike = all(tuple(spec.shape) == shape for spec in indices)
    found = []
    for spec in indices:
        if spec.dtype == "int32":
            found.append(8 * spec.numel)
        if not alike and tuple(spec.shape) != shape:
            found.append(8 * prod(shape))
    return tuple(found)


def _nonzero(op: Op, _: Multiprocessors) -> Buffers:
    """Counts of cub's select, a few bytes per tile."""
    return (op.inputs[0].spec.numel // 400 + 1536,)


def _masked(op: Op, dev: Multiprocessors) -> Buffers:
    """A boolean index becomes its nonzero positions, int64 per dimension of the mask; integers as they are read."""
    masks = [spec for spec in input_specs(op)[1:] if spec.dtype in ("bool", "uint8")]
    if not masks or not op.outputs[0].spec.shape:
        return _index_copies([spec for spec in input_specs(op)[1:] if spec.dtype in _INTEGERS])
    return (8 * op.outputs[0].spec.shape[0] * len(masks[0].shape), masks[0].numel // 400 + 1536)


def _unique(op: Op, _: Multiprocessors) -> Buffers:
    """cub's sort of the values; with inverse indices the sort carries positions, and a scan of differences follows."""
    spec = op.inputs[0].spec
    element = DTYPE_BYTES[spec.dtype]
    inverse = len(op.outputs) > 1 and op.outputs[1].spec.numel > 1
    more = (8 * spec.numel, 8 * spec.numel, 8 * spec.numel) if inverse else ()
    return (*more, _sort_temporary(spec.numel, element + (8 if inverse else 0)))


def _multinomial(op: Op, _: Multiprocessors) -> Buffers:
    """One sample: an exponential variable per weight; the checks of the weights."""
    return (op.inputs[0].spec.nbytes, 512, 512)


# -- convolution -------------------------------------------------------------------------------------------------------


def _convolution(op: Op, _: Multiprocessors) -> Buffers:
    """cuDNN, forward: copies in its own layout (NHWC) of input, output and weight; workspace where it splits sums."""
    strided = _strided(op)
    c = Convolution(input_specs(op)[0], input_specs(op)[1], op.outputs[0].spec, op.attrs, False, weight_last=1 in strided)
    return (c.source.nbytes if 0 in strided and not c.channels_last else 0, _with_alignment(workspace(c)))


def _convolution_backward(op: Op, dev: Multiprocessors) -> Buffers:
    """cuDNN, backward: the largest of its stages, which come one after the other."""
    return max(_convolution_backward_stages(op, dev), key=sum)


def _convolution_backward_stages(op: Op, dev: Multiprocessors) -> tuple[Buffers, ...]:
    """Workspace of the input's gradient, then of the weight's, then the reduction of the bias's.

    Measured was the highest point of the three, above all results, and the weight's pass is given all of it. The input's comes before
    there is a gradient of the weight, and takes copies of its own: blocks that lie between, and what is reserved, depend on both.
    """
    c, copies = _gradient(op)
    found: list[Buffers] = []
    whole = workspace(c)
    if c.mask[0]:
        found.append((*copies, _with_alignment(min(c.data_pass(), whole + c.weight.nbytes) if c.mask[1] else whole)))
    if c.mask[1]:
        found.append((*copies, _with_alignment(whole)))
    if c.mask[2]:
        found.append(_bias_staging(op, c, dev))
    return tuple(found) or ((),)


def _gradient(op: Op) -> tuple[Convolution, Buffers]:
    """The convolution of a backward op, and the copies of its inputs that come before cuDNN: all in the source's layout."""
    strided = _strided(op)
    result, source, weight = input_specs(op)[:3]
    c = Convolution(source, weight, result, op.attrs, True, weight_last=2 in strided)
    if c.channels_last:
        layout = next((mark[7:] for mark in op.attrs if isinstance(mark, str) and mark.startswith("layout:")), "")
        return c, (result.nbytes,) if layout[:1] in ("c", "s", "t") and c.plane_out > 1 else ()
    return c, tuple(spec.nbytes for i, spec in enumerate((result, source)) if i in strided)


def _bias_staging(op: Op, c: Convolution, dev: Multiprocessors) -> Buffers:
    """The sum of the result's gradient over all but channels."""
    batch, channels = c.result.shape[:2]
    rows = c.channels_last or 0 in _strided(op)  # channels vary fastest, which needs the larger staging
    spec = TensorSpec((batch * c.plane_out, channels) if rows else (batch, channels, c.plane_out), c.result.dtype)
    return reduction_staging(spec, frozenset((0,) if rows else (0, 2)), 4, dev)


def _with_alignment(size: int) -> int:
    """cuDNN asks for a little more than its buffers, to align them: up to 147 bytes were seen."""
    return size + 147 if size else 0


# -- recurrent layers --------------------------------------------------------------------------------------------------


def _recurrent(op: Op, _: Multiprocessors) -> Buffers:
    """cuDNN, forward: the input with time first, and the workspace."""
    return scratch_rnn.forward(op)


def _recurrent_backward(op: Op, _: Multiprocessors) -> Buffers:
    """cuDNN, backward: the larger of its two stages, the gradients of input and states, then those of the weights."""
    return max(scratch_rnn.backward(op), key=sum)


def _own_norm_backward(learned: int) -> Rule:
    """Sums of a weight's gradient, and of a bias's, by programs that each go over many rows (kernels/device/norm.py)."""

    def rule(op: Op, sms: Multiprocessors) -> Buffers:
        """From the launcher, with the most programs that any of its configurations has for the width."""
        width = op.inputs[0].spec.shape[-1]
        rows = op.inputs[0].spec.numel // max(1, width)
        parts = min(rows, sms.multiprocessors * next(each for most, each in PARTS_PER_SM if width <= most))
        wanted = [ref for ref in op.outputs[1:] if ref.spec.numel]
        return tuple([parts * width * 4] * min(learned, len(wanted)))

    return rule


_PAIR, _WELFORD = 16, 16
_RULES: dict[str, Rule] = {
    "aten._scaled_dot_product_cudnn_attention.default": scratch_attention.cudnn,
    "aten._scaled_dot_product_cudnn_attention_backward.default": scratch_attention.cudnn_backward,
    "aten._scaled_dot_product_flash_attention.default": scratch_attention.flash,
    "aten._scaled_dot_product_flash_attention_backward.default": scratch_attention.flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": scratch_attention.efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": scratch_attention.efficient_backward,
    "aten.native_layer_norm_backward.default": _layer_norm_backward(2),
    "aten._fused_rms_norm_backward.default": _layer_norm_backward(1),
    **{f"{NAMESPACE}.{add}rms_norm_backward.default": _own_norm_backward(1) for add in ("", "add_")},
    **{f"{NAMESPACE}.{add}layer_norm_backward.default": _own_norm_backward(2) for add in ("", "add_")},
    "aten.native_group_norm.default": _group_norm, "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten._softmax_backward_data.default": _softmax_backward, "aten._safe_softmax.default": _safe_softmax,
    "aten.logsumexp.default": _input_copy, "aten._fft_c2r.default": _input_copy,
    "aten.mse_loss.default": _loss, "aten.smooth_l1_loss.default": _loss, "aten.huber_loss.default": _loss,
    "aten.binary_cross_entropy.default": _loss, "aten.binary_cross_entropy_with_logits.default": _logits_loss,
    "aten._foreach_norm.Scalar": _foreach_norm, "aten.roll.default": _roll,
    "aten.bmm.default": _complex_product, "aten.mm.default": _complex_product,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.sort.default": _sort, "aten.sort.stable": _sort, "aten.argsort.default": _sort, "aten.topk.default": _topk,
    "aten.cumsum.default": _cumulative, "aten.cumprod.default": _cumulative,
    "aten.index_put.default": _index_put, "aten.index_put_.default": _index_put,
    "aten._index_put_impl_.default": _index_put, "aten._unsafe_index_put.default": _index_put,
    "aten.nonzero.default": _nonzero, "aten.index.Tensor": _masked, "aten.masked_select.default": _masked,
    "aten._unique2.default": _unique, "aten.multinomial.default": _multinomial,
    "aten.convolution.default": _convolution, "aten.convolution_backward.default": _convolution_backward,
    "aten._cudnn_rnn.default": _recurrent, "aten._cudnn_rnn_backward.default": _recurrent_backward,
    **dict.fromkeys(
        ("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default", "aten.prod.default", "aten.prod.dim_int"), _summed),
    **dict.fromkeys(
        ("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default", "aten.any.dim",
         "aten.linalg_vector_norm.default", "aten.norm.Scalar", "aten.norm.ScalarOpt_dim"), _REDUCED),
    **dict.fromkeys(("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default"), _reduction(_PAIR)),
    **dict.fromkeys(("aten.var.correction", "aten.std.correction", "aten.var_mean.correction",
                     "aten.std_mean.correction"), _reduction(_WELFORD)),
}  # fmt: skip
