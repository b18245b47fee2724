"""How many floating point operations one op does. Plain data, no torch.

The convention, so that a number can be checked by hand:

- A multiply-add is 2 operations. Products of matrices, convolutions, attention and recurrent layers count
  their multiply-adds and nothing else: no bias, no softmax inside the attention kernel, no gates of a cell.
- Causal attention does half the work; the last rows alone, which only the flash kernel takes, more. Backward of
  attention computes the scores again: 5 products for the 2 of forward. Backward of a convolution counts the gradients
  that are wanted.
- FFT: 5 N log2 N for a complex transform of N points, half of that if one side is real.
- Factorisations of matrices count the cubes of the textbooks, `PER_CUBE`; distances of all pairs 3 for each coordinate.
- Everything else counts per element, at the rates of `PER_ELEMENT`; any function of one element is one
  operation, be it an addition, a comparison or a tanh.
- A complex product is 4 real ones; elsewhere a complex element counts as two. Integers and booleans are no
  floating point: an op that sees nothing else counts 0 (but a product of integer matrices counts as one of floats).
- Moving and selecting data, making tensors, drawing random numbers and sorting count 0.

An op without a rule gives None, never a silent 0: the families below are written out, nothing catches the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from foretell.trace.types import TensorSpec

Specs = Sequence[TensorSpec]
Attrs = tuple[int | float | str | bool, ...]
Rule = Callable[[Specs, Specs, Attrs], int | None]

PER_ELEMENT = {
    "pointwise": 1,  # of the output
    "reduction": 1,  # of the first input
    "accumulation": 1,  # of what is added: scatter_add, index_add, gradient of an embedding
    "norm": 7,  # mean and variance 3, normalise 2, scale and shift 2
    "norm_backward": 8,
    "softmax": 5,  # maximum, subtract, exp, sum, divide
    "softmax_backward": 4,
    "loss": 3,  # difference, its function, sum
    "adam": 3,  # of what it reads: parameter, gradient and two moments, so 12 per parameter
    "adagrad": 3,  # parameter, gradient, sum of squares: 9 per parameter
    "sgd": 2,  # parameter, gradient, momentum: 6 per parameter, 4 without momentum
    "linear": 4, "bilinear": 8, "trilinear": 16, "bicubic": 32,  # interpolation, of the larger end: the output
}  # fmt: skip
PER_CUBE = {
    "cholesky": 1 / 3, "lu": 2 / 3, "inverse": 2, "qr": 4,  # qr with its first factor written out
    "eigh": 9, "svd": 22,  # with vectors, iterations included (Golub and Van Loan)
}  # fmt: skip
"""Of the longer side times the square of the shorter, for each matrix."""
MULTIPLY_ADD = 2
COMPLEX_PRODUCT = 4
ATTENTION_PRODUCTS = (1, 1)
"""Products in forward over the head size of keys, and over that of values: q·k and p·v."""
ATTENTION_BACKWARD_PRODUCTS = (3, 2)
"""q·k again, grad_q and grad_k; grad_v and the gradient of p."""
FFT = 5.0


def flops(name: str, inputs: Specs, outputs: Specs, attrs: Attrs) -> int | None:
    """Floating point operations of one op such as `aten.mm.default`; None where no rule knows."""
    rule = _rule(name)
    return None if rule is None else rule(inputs, outputs, attrs)


def _rule(name: str) -> Rule | None:
    """`aten.add_.Tensor` → that of add.Tensor, or else of add. Ops outside ATen keep their namespace."""
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    if base.endswith("_") and not base.endswith("__"):
        base = base[:-1]
    if namespace != "aten":
        base = f"{namespace}.{base}"
    return _RULES.get(f"{base}.{overload}") or _RULES.get(base)


# ---------------------------------------------------------------- per element


def _is_complex(spec: TensorSpec) -> bool:
    return spec.dtype.startswith("complex")


def _width(*specs: TensorSpec) -> int:
    """What one element counts: 0 if all are integers, 2 if any is complex."""
    if any(_is_complex(spec) for spec in specs):
        return 2
    return int(any("float" in spec.dtype for spec in specs))


def _nothing(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    return 0


def _per_output(rate: int, inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    return rate * outputs[0].numel * _width(*inputs, *outputs)


def _per_input(rate: int, index: int, inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    return rate * inputs[index].numel * _width(inputs[index])


def _per_all_inputs(rate: int, inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """Of all tensors it reads; step counters and learning rates, which have no dimension, are left out."""
    return rate * sum(spec.numel * _width(spec) for spec in inputs if spec.shape)


def _foreach(lists: int, extra: int, inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """Of the first of so many lists; in place, the op has no outputs and its lists come one after another."""
    first = outputs or inputs[: (len(inputs) - extra) // lists]
    return PER_ELEMENT["pointwise"] * sum(spec.numel * _width(spec) for spec in first)


def _nll_loss(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """It picks one number for every target and adds them up."""
    return PER_ELEMENT["reduction"] * inputs[1].numel


def _embedding_bag(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    return PER_ELEMENT["accumulation"] * inputs[1].numel * inputs[0].shape[-1]


# ---------------------------------------------------------------- products


def _products(count: int, spec: TensorSpec) -> int:
    return count * MULTIPLY_ADD * (COMPLEX_PRODUCT if _is_complex(spec) else 1)


def _gemm(left: int, inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """Every element of the output is a row of the left matrix times a column: as long as its last dimension."""
    return _products(outputs[0].numel * inputs[left].shape[-1], outputs[0])


def _grouped_mm(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    left, right = inputs[:2]
    if len(left.shape) == len(right.shape) == 2:  # the groups share out the dimension that is summed
        return _products(left.numel * right.shape[-1], left)
    return _gemm(0, inputs, outputs, attrs)


def _flags(attrs: Attrs) -> list[bool]:
    """Strides, paddings and groups are numbers: the booleans keep their order whatever the dimensions."""
    return [value for value in attrs if isinstance(value, bool)]


def _convolve(weight: TensorSpec, places: TensorSpec) -> int:
    """The whole filter at every place of the output, or of the input if it is transposed; whatever the groups."""
    dims = len(weight.shape) - 2
    batch = places.shape[0] if len(places.shape) == dims + 2 else 1
    return _products(weight.numel * batch * math.prod(places.shape[len(places.shape) - dims :]), weight)


def _convolution(transposed: bool | None, inputs: Specs, outputs: Specs, attrs: Attrs) -> int | None:
    """Whether it is transposed, the name says, or else the first flag of the attributes."""
    flags = _flags(attrs) if transposed is None else [transposed]
    return _convolve(inputs[1], inputs[0] if flags[0] else outputs[0]) if flags else None


def _convolution_backward(inputs: Specs, outputs: Specs, attrs: Attrs) -> int | None:
    flags = _flags(attrs)  # transposed; gradient of input, of weight, of bias [; channels last]
    if len(flags) < 4:
        return None
    transposed, of_input, of_weight = flags[:3]
    grad, data, weight = inputs[:3]
    return (of_input + of_weight) * _convolve(weight, data if transposed else grad)


def _attention(
    first: int, products: tuple[int, int], inputs: Specs, outputs: Specs, attrs: Attrs, *, last: bool = False
) -> int:
    """(batch, heads, sequence, head size); keys and values may have fewer heads than queries. With `last`, causal queries
    fewer than keys are the last rows of a square."""
    query, key, value = inputs[first : first + 3]
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    count = MULTIPLY_ADD * scores * (products[0] * key.shape[-1] + products[1] * value.shape[-1])
    if not any(_flags(attrs)):  # dropout is a float, causal the only boolean
        return count
    rows, columns = query.shape[-2], key.shape[-2]
    return count * (2 * columns - rows) // (2 * columns) if last and rows < columns else count // 2


def _recurrent(passes: int, inputs: Specs, outputs: Specs, attrs: Attrs) -> int | None:
    """Every token meets every weight once; backward does so twice."""
    weights = 0
    for spec in inputs[1:]:
        if passes > 1 and len(spec.shape) == 3:
            break  # the states: after them come outputs and gradients, which are matrices if sequences are packed
        weights += spec.numel if len(spec.shape) == 2 else 0
    return passes * MULTIPLY_ADD * weights * math.prod(inputs[0].shape[:-1]) if weights else None


def _recurrent_layer(passes: int, inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """One layer and direction on a CPU: after the input come its two weights."""
    weights = inputs[1].numel + inputs[2].numel
    return passes * MULTIPLY_ADD * weights * math.prod(inputs[0].shape[:-1])


def _trilinear(inputs: Specs, outputs: Specs, attrs: Attrs) -> int | None:
    """`bilinear` and its gradients: of two inputs, an output and a weight of three dims, every sample meets the whole weight."""
    weight = next((spec for spec in (*inputs, *outputs) if len(spec.shape) == 3), None)
    samples = next((spec.shape[0] for spec in inputs if len(spec.shape) == 2), 1)
    return None if weight is None else _products(weight.numel * samples, weight)


def _fft(real: str, inputs: Specs, outputs: Specs, attrs: Attrs) -> int | None:
    """Attributes are the transformed dimensions."""
    whole = outputs[0] if real == "output" else inputs[0]
    dims = [dim for dim in attrs if isinstance(dim, int)]
    if not dims:
        return None
    points = math.prod(whole.shape[dim] for dim in dims)
    return round(FFT * (0.5 if real else 1.0) * whole.numel * math.log2(max(1, points)))


def _factors(rate: float, inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    *batch, rows, columns = inputs[0].shape
    cube = math.prod(batch) * max(rows, columns) * min(rows, columns) ** 2
    return round(rate * cube * (COMPLEX_PRODUCT if _is_complex(inputs[0]) else 1))


def _solve(rate: float, triangles: int, inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """The factors, if they are not given, and then so many triangles, half a square each, for the right sides."""
    products = _products(inputs[-1].numel * inputs[0].shape[-1], inputs[0])
    return _factors(rate, inputs, outputs, attrs) + products * triangles // 2


def _distances(first: int, inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """Of all pairs of two lists of points: differences, their function, its sum."""
    left, right = inputs[first : first + 2]
    return PER_ELEMENT["loss"] * left.numel * right.shape[-2]


# ---------------------------------------------------------------- families

_MOVEMENT = """
alias arange argsort argwhere as_strided as_strided_scatter _assert_async _assert_tensor_metadata bernoulli
broadcast_to bucketize cat cauchy chunk _chunk_cat clone complex concat _conj conj constant_pad_nd contiguous copy
_cudnn_init_dropout_state _cudnn_rnn_flatten_weight detach diag diag_embed diagflat diagonal diagonal_backward
diagonal_scatter embedding empty empty_like empty_permuted empty_strided expand expand_as exponential eye fill
fill_diagonal flatten flip _foreach_clone _foreach_copy _foreach_zero full full_like _functional_assert_async gather
hann_window geometric hstack im2col imag index index_copy index_fill index_put _index_put_impl index_select
item kthvalue lift lift_fresh _linalg_check_errors
linspace _local_scalar_dense log_normal mT masked_fill masked_scatter masked_scatter_backward masked_select meshgrid mode
moveaxis movedim multinomial narrow native_channel_shuffle _neg_view new_empty new_empty_strided new_full new_ones
new_zeros nll_loss2d_backward nll_loss_backward nonzero normal one_hot ones ones_like _pack_padded_sequence
_pack_padded_sequence_backward pad _pad_packed_sequence permute _pin_memory pin_memory pixel_shuffle pixel_unshuffle
poisson positive rand rand_like randint randint_like randn randn_like random randperm real record_stream repeat
repeat_interleave reshape _reshape_alias reshape_as resize resolve_conj resolve_neg roll rot90 scalar_tensor scatter
searchsorted select select_backward select_scatter set slice slice_backward slice_scatter sort split split_with_sizes
split_with_sizes_copy squeeze stack swapaxes sym_numel sym_size sym_storage_offset sym_stride t take tensor_split tile
to _to_copy topk transpose tril tril_indices triu triu_indices type_as unbind unflatten unfold uniform _unique _unique2
unique_consecutive unique_dim _unsafe_index _unsafe_index_put unsafe_split unsafe_split_with_sizes _unsafe_view
unsqueeze value_selecting_reduction_backward view view_as view_as_complex view_as_real vstack where zero zeros
zeros_like foretell.begin foretell.model_end
foretell.byte_dequantize foretell.nf4_dequantize profiler._record_function_enter profiler._record_function_enter_new
profiler._record_function_exit foretell.all_reduce foretell.all_gather foretell.reduce_scatter foretell.all_to_all
"""
_RESIZE = """
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d
"""
_POINTWISE = """
abs absolute acos acosh add addcdiv addcmul addr _amp_update_scale __and__ angle asin asinh atan atan2 atanh
bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max
clamp_min clip _conj_physical conj_physical
copysign cos cosh cross cummax _cummax_helper cummin _cummin_helper cumprod cumsum diff digamma div divide dropout eq
erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge ger greater greater_equal gt hypot __iand__
__ior__ isclose isfinite isin isinf isnan __ixor__ le lerp less less_equal lgamma linalg_cross log log10 log1p log2
log_sigmoid_forward logaddexp logaddexp2 _logcumsumexp logcumsumexp logical_and logical_not logical_or logical_xor lt
_masked_scale maximum minimum mul multiply nan_to_num ne neg negative not_equal __or__ outer polar pow prelu reciprocal
relu relu6 remainder round rrelu rsqrt rsub selu sgn sign signbit sin sinc sinh sqrt square sub subtract tan
_thnn_fused_lstm_cell_backward_impl true_divide trunc xlogy __lshift__ __rshift__ __xor__
"""
_ACTIVATION = """
elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid logit mish native_dropout _prelu_kernel
rrelu_with_noise sigmoid silu softplus softshrink tanh threshold
"""
_REDUCTION = """
adaptive_avg_pool2d adaptive_avg_pool3d all amax amin _aminmax aminmax any argmax argmin avg_pool1d bincount col2im
count_nonzero equal histc _is_all_true linalg_norm linalg_vector_norm logsumexp max max_pool1d max_pool2d max_pool3d
mean median min nanmean nansum norm prod segment_reduce std std_mean sum sum_to_size _thnn_fused_gru_cell
_thnn_fused_gru_cell_backward _thnn_fused_lstm_cell trace unfold_backward var var_mean
"""
_POOL = """
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool3d
max_pool2d_with_indices max_pool3d_with_indices
"""
_LOSS = "binary_cross_entropy huber_loss mse_loss smooth_l1_loss soft_margin_loss"
_NORM = """
layer_norm native_layer_norm group_norm native_group_norm instance_norm rms_norm _fused_rms_norm batch_norm
native_batch_norm cudnn_batch_norm _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional
_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _weight_norm
_weight_norm_interface
"""
_NORM_BACKWARD = """
native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward native_batch_norm_backward
cudnn_batch_norm_backward batch_norm_backward _weight_norm_interface_backward
"""
_SOFTMAX = "softmax _softmax _safe_softmax log_softmax _log_softmax _masked_softmax cross_entropy_loss"
_FOREACH_BINARY = "add sub mul div maximum minimum clamp_max clamp_min pow"
_FOREACH = f"""{_FOREACH_BINARY} abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p
log2 neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"""
_INTERPOLATION = {
    "linear": "upsample_linear1d",
    "bilinear": "upsample_bilinear2d _upsample_bilinear2d_aa grid_sampler_2d",
    "trilinear": "upsample_trilinear3d grid_sampler_3d",
    "bicubic": "upsample_bicubic2d _upsample_bicubic2d_aa",
}
_GEMM = "mm bmm mv dot vdot inner matmul linalg_matmul linear linalg_vecdot _int_mm _scaled_mm"
_CONVOLUTION = "conv1d conv2d conv3d cudnn_convolution _conv_depthwise2d conv_depthwise3d _slow_conv2d_forward"
_TRANSPOSED = "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution_transpose"
_ATTENTION = """
_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention_for_cpu
"""
_FLASH = "_scaled_dot_product_flash_attention"


def _each(pattern: str, names: str) -> str:
    return " ".join(pattern.format(name) for name in names.split())


def _families() -> list[tuple[str, Rule]]:
    """Names and the rule they share; no name is in two of them."""
    rate = PER_ELEMENT
    pointwise, reduction = partial(_per_output, rate["pointwise"]), partial(_per_input, rate["reduction"], 0)
    return [
        (f"{_MOVEMENT} {_RESIZE}", _nothing),
        (f"{_POINTWISE} {_ACTIVATION} max.other min.other", pointwise),
        (_each("{}_backward", f"{_ACTIVATION} {_POOL} {_LOSS}"), pointwise),
        (f"{_REDUCTION} {_POOL}", reduction),
        (_each("{}_backward", _RESIZE), reduction),
        (_NORM, partial(_per_input, rate["norm"], 0)),
        (_NORM_BACKWARD, partial(_per_input, rate["norm_backward"], 0)),
        ("batch_norm_stats", partial(_per_input, 3, 0)),  # batch norm over several devices: with the next, a norm
        ("batch_norm_elemt", partial(_per_input, rate["norm"] - 3, 0)),
        ("batch_norm_gather_stats batch_norm_gather_stats_with_counts", partial(_per_input, 3, 1)),
        ("batch_norm_backward_reduce batch_norm_backward_elemt", partial(_per_input, rate["norm_backward"] // 2, 0)),
        (_SOFTMAX, partial(_per_input, rate["softmax"], 0)),
        (_each("{}_backward_data", "_softmax _log_softmax"), partial(_per_input, rate["softmax_backward"], 0)),
        (f"{_LOSS} l1_loss kl_div binary_cross_entropy_with_logits", partial(_per_input, rate["loss"], 0)),
        ("nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward nll_loss_nd", _nll_loss),
        ("scatter_add scatter_reduce index_add index_reduce", partial(_per_input, rate["accumulation"], 2)),
        ("embedding_dense_backward embedding_backward", partial(_per_input, rate["accumulation"], 0)),
        ("embedding_bag _embedding_bag _embedding_bag_forward_only", _embedding_bag),
        ("_embedding_bag_backward _embedding_bag_dense_backward", _embedding_bag),
        *[(names, partial(_per_output, rate[kind])) for kind, names in _INTERPOLATION.items()],
        *[(_each("{}_backward", names), partial(_per_input, rate[kind], 0)) for kind, names in _INTERPOLATION.items()],
        ("_fused_adam _fused_adamw foretell.coded_adamw", partial(_per_all_inputs, rate["adam"])),
        ("_fused_adagrad", partial(_per_all_inputs, rate["adagrad"])),
        ("_fused_sgd", partial(_per_all_inputs, rate["sgd"])),
        ("_foreach_norm _foreach_max _foreach_powsum", partial(_per_all_inputs, rate["reduction"])),
        ("_amp_foreach_non_finite_check_and_unscale", partial(_per_all_inputs, rate["pointwise"])),
        (_each("_foreach_{}", _FOREACH), partial(_foreach, 1, 0)),
        (_each("_foreach_{}.Tensor", "add mul div"), partial(_foreach, 1, 1)),
        (_each("_foreach_{}.List", _FOREACH_BINARY), partial(_foreach, 2, 0)),
        ("_foreach_lerp", partial(_foreach, 2, 0)),
        ("_foreach_lerp.List _foreach_addcmul _foreach_addcdiv", partial(_foreach, 3, 0)),
        ("_foreach_addcmul.Tensor _foreach_addcdiv.Tensor", partial(_foreach, 3, 1)),
        (_GEMM, partial(_gemm, 0)),
        ("addmm addmv baddbmm _addmm_activation", partial(_gemm, 1)),
        ("_grouped_mm _scaled_grouped_mm", _grouped_mm),
        ("affine_grid_generator", partial(_gemm, 0)),
        ("_trilinear", _trilinear),
        ("convolution _convolution convolution_overrideable", partial(_convolution, None)),
        (_CONVOLUTION, partial(_convolution, False)),
        (_TRANSPOSED, partial(_convolution, True)),
        ("convolution_backward convolution_backward_overrideable", _convolution_backward),
        (_ATTENTION, partial(_attention, 0, ATTENTION_PRODUCTS)),
        ("scaled_dot_product_attention _scaled_dot_product_attention_math", partial(_attention, 0, ATTENTION_PRODUCTS)),
        (_each("{}_backward", _ATTENTION), partial(_attention, 1, ATTENTION_BACKWARD_PRODUCTS)),
        (_FLASH, partial(_attention, 0, ATTENTION_PRODUCTS, last=True)),
        (f"{_FLASH}_backward", partial(_attention, 1, ATTENTION_BACKWARD_PRODUCTS, last=True)),
        ("_cudnn_rnn lstm gru rnn_tanh rnn_relu", partial(_recurrent, 1)),
        ("_cudnn_rnn_backward", partial(_recurrent, 2)),
        ("mkldnn_rnn_layer", partial(_recurrent_layer, 1)),
        ("mkldnn_rnn_layer_backward", partial(_recurrent_layer, 2)),
        ("_fft_c2c", partial(_fft, "")),
        ("_fft_r2c", partial(_fft, "input")),
        ("_fft_c2r", partial(_fft, "output")),
        ("linalg_cholesky_ex", partial(_factors, PER_CUBE["cholesky"])),
        ("_linalg_det _linalg_slogdet linalg_lu_factor_ex", partial(_factors, PER_CUBE["lu"])),
        ("linalg_inv_ex", partial(_factors, PER_CUBE["inverse"])),
        ("linalg_qr", partial(_factors, PER_CUBE["qr"])),
        ("_linalg_eigh", partial(_factors, PER_CUBE["eigh"])),
        ("_linalg_svd", partial(_factors, PER_CUBE["svd"])),
        ("_linalg_solve_ex", partial(_solve, PER_CUBE["lu"], 2)),
        ("linalg_lu_solve", partial(_solve, 0, 2)),
        ("linalg_solve_triangular", partial(_solve, 0, 1)),
        ("_cdist_forward _euclidean_dist", partial(_distances, 0)),
        ("_cdist_backward", partial(_distances, 1)),
    ]


_RULES: dict[str, Rule] = {name: rule for names, rule in _families() for name in names.split()}
