"""Ops that move bytes: how many, in which layouts, by rows, elements, indices or lists of tensors."""

from __future__ import annotations

import math

from foretell.hardware.generations import reference
from foretell.hardware.types import Device
from foretell.price.kernels.lines import lines
from foretell.price.kernels.shapes import LAUNCH_SECONDS, Described, Shape, letters_of, log, nbytes, two_power
from foretell.trace.types import TensorSpec
from foretell.units import DTYPE_BYTES

_PICTURES = " ".join(
    f"{name} {name}_backward"
    for name in """max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
        upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa""".split()  # noqa: SIM905
)
_SWEEPING = ("upsample_linear", "upsample_bilinear", "upsample_bicubic", "upsample_trilinear")
"""One thread goes through all pictures and channels at one place."""
_ALL_AT_ONCE = ("upsample_bilinear2d",)
"""With channels side by side, a thread for every number."""
FEW_CHANNELS = 4
"""Fewer are resized as if they did not lie side by side."""
_ONE_BY_ONE = ("im2col", "upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward")
"""Pictures of a batch come one after another."""
_KINDS: dict[str, str] = {
    name: kind
    for kind, names in {
        "reduction": "sum mean amax amin linalg_vector_norm prod argmax argmin any all var std var_mean max min norm logsumexp",
        "norm": "native_layer_norm _fused_rms_norm rms_norm add_rms_norm layer_norm add_layer_norm",
        "norm_backward": """native_layer_norm_backward _fused_rms_norm_backward rms_norm_backward add_rms_norm_backward layer_norm_backward
            add_layer_norm_backward""",
        "channels": "native_group_norm native_batch_norm cudnn_batch_norm batch_norm",
        "channels_backward": "native_group_norm_backward native_batch_norm_backward cudnn_batch_norm_backward",
        "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax",
        "gather": "embedding index_select index gather _unsafe_index take _embedding_bag _embedding_bag_forward_only",
        "scatter": """scatter_add scatter_add_ index_add index_add_ scatter scatter_ scatter_reduce index_copy_ index_copy index_fill
            index_reduce masked_scatter put""",
        "sorted": "embedding_dense_backward index_put index_put_ _index_put_impl_ _unsafe_index_put _embedding_bag_backward",
        "order": "sort topk argsort cumsum cumprod cummax cummin _cummax_helper _cummin_helper logcumsumexp kthvalue median mode",
        "pool": _PICTURES,
        "copy": """copy_ clone _to_copy cat stack constant_pad_nd slice_backward select_backward repeat roll flip pixel_shuffle
            pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
            im2col col2im tril triu diagonal_backward as_strided_scatter slice_scatter select_scatter diag_embed unfold_backward""",
        "fill": "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill_ zero_ arange linspace eye",
        "random": "native_dropout bernoulli_ rand randn normal_ uniform_ random_ rand_like randn_like randint randint_like exponential_",
        "loss": "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",
        "fourier": "_fft_r2c _fft_c2r _fft_c2c",
    }.items()
    for name in names.split()
}
KINDS = (
    "pointwise", "reduction", "norm", "norm_backward", "channels", "channels_backward", "softmax", "gather", "scatter",
    "sorted", "order", "pool", "copy", "fill", "random", "fourier", "lists", "loss",
)  # fmt: skip
_NUMBERS = {kind: float(number) for number, kind in enumerate(KINDS)}
_LAYOUTS = {"c": "read", "t": "swapped", "s": "strided", "l": "last", "b": "spread"}
_KEEPS_LAYOUT = ("pointwise", "copy", "random")
_CHANNELS = ("channels", "channels_backward")
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "batch_norm")
LONG_ROW = 128
"""Shorter rows are summed number by number: where they begin makes no difference."""
LOGSUMEXP = {"launches": 9, "read": 4, "written": 2}
"""Kernels of a logsumexp on a GPU, and how often they read and write what is summed: the largest, what is subtracted, its
exponential and their sum, then six of the result's size."""
_MANY_BLOCKS = ((4001, 400), (800, 800), (200, 3000), (81, 5000), (41, 8000), (21, 10000), (1, 20000))
"""From so many rows, the least length of those that torch gives several blocks when it chooses the largest numbers."""
_BAGS = "_embedding_bag"
"""Ops that sum rows of a table begin so."""
_SCANS = ("cum", "logcumsumexp", "_cum")
MOST_DOUBLINGS = 9
"""Where rows are more often doubled than their length by more than this, torch takes a block of 512 threads for each of them."""
FEW_LANES = 2
"""So few columns side by side are read together."""
SHORT_SORT = 4096
"""Rows that one block sorts by itself; longer ones are sorted all together."""
FEW_INDICES = 3072
"""Up to so many are added without being sorted."""
CHUNK = 65536
"""Elements of a list's tensor that one block takes."""


def kind_of(name: str) -> str:
    """Which kind of byte mover an op is."""
    if name.startswith(("_foreach", "_fused_adam", "_fused_sgd", "_amp_foreach", "coded_adamw")):
        return "lists"
    return _KINDS.get(name) or _KINDS.get(name.removesuffix("_")) or "pointwise"


def goes_by_data(name: str) -> bool:
    """Whether data decide where an op reads and adds, or how its work is shared out: its seconds are less certain than its bytes."""
    return "grouped" in name or (name != "embedding" and kind_of(name) in ("gather", "scatter", "sorted"))


def mover(name: str, op: Shape, device: Device) -> Described:
    """An op that moves bytes, in numbers."""
    kind = kind_of(name)
    if kind == "lists":
        return _lists(name, op, device)
    kept = name in _BATCH_NORMS and len(op.outputs) > 1 and not op.outputs[1].numel
    if kept:
        kind = "pointwise"  # statistics that are known already: each number for itself
    letters = letters_of(op.attrs)
    if kind in _KEEPS_LAYOUT and name != "clone" and set(letters) in ({"l"}, {"t"}):
        letters = ""  # all alike and without gaps: as good as contiguous
    bags = name.startswith(_BAGS)
    first = max(op.inputs, key=_numel) if op.inputs and not bags else op.outputs[0]
    last = op.outputs[0] if op.outputs else first
    moved = _moved(name, kind, op, letters)
    each = kind == "gather" and not bags and _one_by_one(name, op, last, letters)
    if each:
        kind = "pointwise"
        moved["read"] += _sectors(op, last, device)
    total = sum(moved.values())
    inner = first.shape[-1] if first.shape else 1
    numel, out = max(1, first.numel), max(1, last.numel)
    rows = numel // max(1, inner)
    lane = _lane(kind, op, first, numel, out)
    indices = float(sum([spec.numel for spec in op.inputs if spec.dtype in ("int64", "int32")]))
    cores = reference().sm_count / device.sm_count
    rate = device.memory_bandwidth_bytes_per_second
    cache = float(device.l2_bytes or 1)
    many = max(numel, out)
    terms = {name: value / rate for name, value in moved.items() if value}
    terms |= {"one": 1e-6, "over": max(0.0, total - 0.6 * cache) / rate, "elements": many * 1e-12 * cores}
    if device.backend == "cpu":
        walked = dict(zip(("lines", "planes"), lines(kind, op), strict=True))
        terms |= {name: count * 1e-8 for name, count in walked.items()}
    if kind in _CHANNELS and not _last(op, first):
        terms |= _by_channel(first, lane, total, device)
    elif lane:
        terms["lane"] = lane * 1e-9
    if kind in ("norm", "norm_backward", "softmax", "reduction", "order", "loss"):
        terms["rows"] = (rows * _crew(kind, op, inner, out) if kind != "order" else numel / along(op, first)) * 1e-9 * cores
        terms["odd_rows"] = rows * 1e-9 * cores if inner % 4 and (kind != "reduction" or inner >= LONG_ROW) else 0.0
    if kind in ("gather", "scatter", "sorted"):
        terms |= _by_places(name, kind, op, last, cores)
    if kind in ("pool", "copy") and device.backend != "cpu" and not _at_once(name, op, first):
        terms |= _by_picture(name, first, last, cores, max(0.0, 1 - 0.6 * cache / max(1.0, total)))
    if kind == "order":
        terms["along"] = along(op, first) * 1e-9
        terms["passes"] = numel * log(along(op, first) + 1) * 1e-12 * cores
        if name.startswith(_SCANS) and (lanes := _lanes(op, first)) and along(op, first) < numel:
            terms = {name: value for name, value in terms.items() if name in ("read", "written", "one", "over")}
            terms |= _down(numel / along(op, first) / lanes, along(op, first), max(0.0, 1 - 0.6 * cache / max(1.0, total)), cores)
        elif many_blocks(name, op, first):
            digits = DTYPE_BYTES.get(first.dtype, 4)  # a pass over all for each, and one more to gather
            blocks = digits * numel / along(op, first) * 1e-9 * cores
            terms |= {"read": (digits + 1) * first.nbytes / rate, "chosen_rows": blocks, "rows": 0.0, "along": 0.0, "passes": 0.0, "elements": 0.0}
    if name == "logsumexp" and device.backend != "cpu":
        terms["one"] = LOGSUMEXP["launches"] * 1e-6
    base = LAUNCH_SECONDS + total / rate
    values = {
        "moved": log(total + 1), "numel": log(numel), "out": log(out), "shrink": log(numel / out),
        "inner": log(max(1, inner)), "rows": log(rows), "inputs": float(len(op.inputs)),
        "width": float(DTYPE_BYTES.get(first.dtype, 2)), "width_out": float(DTYPE_BYTES.get(last.dtype, 2)),
        "mixed": float(len({spec.dtype for spec in op.inputs if spec.shape}) > 1), "swapped": float(letters.count("t")),
        "strided": float(letters.count("s")), "spread": float(letters.count("b")), "last": float(letters.count("l")),
        "first_letter": float("ctslb".find(letters[:1])) if letters else 0.0,
        "second_letter": float("ctslb".find(letters[1:2])) if letters else 0.0,
        "cache": log(total / cache), "align": two_power(inner), "dims": float(len(first.shape)),
        "small": log(min([spec.numel for spec in op.inputs if spec.shape], default=1) + 1),
        "keeps": float(bool(last.shape) and last.shape[-1] == inner), "lane": log(lane + 1), "indices": log(indices + 1),
        "second": log(first.shape[-2] if len(first.shape) > 1 else 1), "kind": _NUMBERS[kind],
        "chunks": 0.0, "equal": float(numel == out),
    }  # fmt: skip
    if device.backend == "cpu":
        values |= {name: log(count + 1) for name, count in walked.items()}
    key = f"each:{name}" if each else f"kept:{name}" if kept else _key(name, kind, op, first, inner, out)
    return Described("stream", key, kind, base, terms, values)


def _by_channel(first: TensorSpec, lane: float, total: float, device: Device) -> dict[str, float]:
    """A block goes through one channel, picture by picture; what the cache does not hold comes to it at the pace of one block."""
    far = max(0.0, 1 - 0.6 * float(device.l2_bytes or 1) / max(1.0, total))
    turns = first.shape[0] * max(1.0, first.shape[1] / device.sm_count)
    return {"channel": lane * 1e-9, "channel_far": lane * 1e-9 * far, "pictures": turns * 1e-8}


def _by_places(name: str, kind: str, op: Shape, last: TensorSpec, cores: float) -> dict[str, float]:
    """What indices cost besides bytes: each of them, each number that is added, and those that wait for others at one place."""
    count, length = _touched(kind, op, last)
    low = DTYPE_BYTES.get(last.dtype, 4) < 4
    terms = {"indices": count * 1e-9 * cores, "atoms_low" if low else "atoms": count * length * 1e-11 * cores}
    if kind != "gather":
        terms["crowd_low" if kind == "scatter" and low else "crowd"] = count / max(1.0, max(1, last.numel) / length) * 1e-9
    if name.startswith(_BAGS):  # rows of one sum come one after another
        terms["chain"] = count / max(1, op.inputs[2].numel) * 1e-8
    if kind == "sorted":
        terms["sorting"] = count * log(count + 1) * 1e-11 * cores
    return terms


def _at_once(name: str, op: Shape, first: TensorSpec) -> bool:
    """Whether a resizing op has a thread for every number it writes, as it has where channels lie side by side."""
    return name.startswith(_ALL_AT_ONCE) and not name.endswith("_backward") and letters_of(op.attrs)[:1] == "l" and first.shape[1] >= FEW_CHANNELS


def _by_picture(name: str, first: TensorSpec, last: TensorSpec, cores: float, far: float) -> dict[str, float]:
    """What pictures cost besides their bytes: resized ones are gone through one after another at every place, slower where the cache
    does not hold them, and gradients of larger ones are added many to one place."""
    if name in _ONE_BY_ONE:
        return {"pictures": first.shape[0] * 1e-6}
    if not name.startswith(_SWEEPING):
        return {}
    turns = first.shape[0] * first.shape[1] * 1e-9
    if not name.endswith("_backward"):
        return {"sweep": turns, "sweep_far": turns * far}
    numel, low = max(1, first.numel), "_low" if DTYPE_BYTES.get(last.dtype, 4) < 4 else ""
    return {"sweep": turns, f"atoms{low}": numel * 1e-11 * cores, f"crowds{low}": numel * numel / max(1, last.numel) * 1e-12 * cores}


def _key(name: str, kind: str, op: Shape, first: TensorSpec, inner: int, out: int) -> str:
    if kind == "reduction":
        return f"{name}:{_side(op, inner, out)}"
    if kind == "order" and first.shape:
        length = along(op, first)
        if many_blocks(name, op, first):
            return f"{name}:blocks"
        if length == first.numel:
            return f"{name}:one"
        if name.startswith(_SCANS):
            lanes = _lanes(op, first)
            many = _doublings(max(1, first.numel // length)) - _doublings(length) > MOST_DOUBLINGS
            return f"{name}:{('short' if many else 'last') if not lanes else 'narrow' if lanes <= FEW_LANES else 'other'}"
        return f"{name}:{'last' if length == inner else 'other'}{'' if 'sort' not in name or length <= SHORT_SORT else ':long'}"
    if (kind in _CHANNELS and _last(op, first)) or _at_once(name, op, first):
        return f"{name}:last"
    if kind == "sorted":
        return f"{name}:{'few' if _touched(kind, op, op.outputs[0] if op.outputs else first)[0] <= FEW_INDICES else 'many'}"
    return name


def _last(op: Shape, spec: TensorSpec) -> bool:
    """Whether channels lie side by side, as a single one always does."""
    return letters_of(op.attrs)[:1] == "l" or len(spec.shape) == 2 or (len(spec.shape) > 2 and spec.shape[1] == 1)


def along(op: Shape, spec: TensorSpec) -> int:
    """Length of the dimension that is sorted or summed along: the one in attrs, or else the last."""
    dim = next((value for value in op.attrs if type(value) is int), -1)
    return max(1, spec.shape[dim]) if spec.shape and -len(spec.shape) <= dim < len(spec.shape) else 1


def _down(columns: float, length: int, far: float, cores: float) -> dict[str, float]:
    """Of running sums: a thread goes down each column, number by number, and waits for each; slower where the cache does not hold them."""
    return {"down": length * 1e-7, "down_far": length * 1e-7 * far, "columns": columns * 1e-9 * cores}


def _doublings(count: int) -> int:
    return (count - 1).bit_length()


def _lanes(op: Shape, spec: TensorSpec) -> int:
    """How many numbers lie side by side behind the dimension that is summed along; 0 where it is the last."""
    dim = next((value for value in op.attrs if type(value) is int), -1)
    inside = -len(spec.shape) <= dim < len(spec.shape) and dim % len(spec.shape) < len(spec.shape) - 1
    return math.prod(spec.shape[dim % len(spec.shape) + 1 :]) if inside else 0


def many_blocks(name: str, op: Shape, spec: TensorSpec) -> bool:
    """Whether torch chooses the largest numbers of a row with several blocks, digit by digit."""
    length = along(op, spec) if spec.shape else 1
    rows = spec.numel // max(1, length)
    return name == "topk" and length >= next((least for fewest, least in _MANY_BLOCKS if rows >= fewest), length + 1)


SLICE_BYTES, SECTOR_BYTES = 16, 32
"""Rows of whole slices are copied by a block each; what is picked from memory far apart comes in sectors."""


def _one_by_one(name: str, op: Shape, last: TensorSpec, letters: str) -> bool:
    """Whether elements are picked singly: by several indices, or from rows that are not whole slices of 16 bytes."""
    indices = [spec for spec in op.inputs[1:] if spec.dtype in ("int64", "int32")]
    if len(indices) != 1:
        return len(indices) > 1
    if name in ("gather", "take"):
        return name == "take" or letters[1:2] != "b" or last.shape[-1] * DTYPE_BYTES.get(last.dtype, 4) % SLICE_BYTES != 0
    return last.nbytes // max(1, indices[0].numel) % SLICE_BYTES != 0


def _sectors(op: Shape, last: TensorSpec, device: Device) -> float:
    """Bytes that come with what is picked from a table larger than the cache."""
    table, width = op.inputs[0], DTYPE_BYTES.get(last.dtype, 4)
    return float(last.numel * (SECTOR_BYTES - width)) if table.nbytes > (device.l2_bytes or 0) and width < SECTOR_BYTES else 0.0


def _crew(kind: str, op: Shape, inner: int, out: int) -> float:
    """Of the threads that a long row gets, the share that a short one does: several short rows are done side by side."""
    if kind == "softmax":
        return min(1.0, 2.0 ** math.ceil(math.log2(max(1, inner))) / 32)
    if kind == "reduction" and _side(op, inner, out) == "first":
        return min(1.0, 2.0 ** int(math.log2(max(1, inner))) / 16)
    return 1.0


def _side(op: Shape, inner: int, out: int) -> str:
    """What a reduction leaves: a single number, the last dimension, or others."""
    kept = op.outputs[0].shape if op.outputs else ()
    return "all" if out == 1 else "last" if kept and kept[-1] == inner else "first"


def _numel(spec: TensorSpec) -> int:
    return spec.numel


def _moved(name: str, kind: str, op: Shape, letters: str) -> dict[str, float]:
    """Bytes read by layout, and written; of tables, only the rows that are touched."""
    written = float(nbytes(op.outputs))
    inputs = op.inputs
    if kind == "fill" or name == "nll_loss_backward":
        return {"written": written}
    if kind == "loss":
        return {"read": float(nbytes([spec for spec in inputs if len(spec.shape) < 2])), "written": written}
    if name.startswith(_BAGS):
        rows = float(op.inputs[1].numel * (op.inputs[0] if kind == "gather" else op.outputs[0]).shape[-1] * DTYPE_BYTES.get(op.inputs[0].dtype, 4))
        return {"read": rows if kind == "gather" else float(nbytes(inputs)), "written": float(op.outputs[0].nbytes)}
    if kind == "gather":
        index = sum([spec.nbytes for spec in inputs[1:] if spec.dtype in ("int64", "int32")])
        return {"read": written + index, "written": written}
    into = name == "copy_" and letters[:1] not in ("", "c")
    if name == "copy_" and len(inputs) > 1:
        inputs, letters = inputs[1:], letters[1:] if len(letters) == len(op.inputs) else ""
    moved = {"read": 0.0, "written": written}
    if name == "logsumexp":
        whole = float(nbytes(inputs))
        return {"read": LOGSUMEXP["read"] * whole, "written": LOGSUMEXP["written"] * whole + written}
    if len(letters) != len(inputs):
        moved["read"] = float(nbytes(inputs))
    else:
        for spec, letter in zip(inputs, letters, strict=True):
            place = "ragged" if letter == "s" and _ragged(spec) else _LAYOUTS.get(letter, "read")
            moved[place] = moved.get(place, 0.0) + spec.nbytes
    if name == "copy_" and into:
        moved["written_ragged" if _ragged(op.outputs[0]) else "written_apart"], moved["written"] = written, 0.0
    return moved


def _ragged(spec: TensorSpec) -> bool:
    """Whether rows of a strided tensor begin anywhere rather than at multiples of 16 bytes."""
    return not spec.shape or spec.shape[-1] * DTYPE_BYTES[spec.dtype] % 16 != 0


def _lane(kind: str, op: Shape, first: TensorSpec, numel: int, out: int) -> float:
    """Elements that one thread block has to go through alone."""
    if kind == "reduction":
        return numel / out
    if kind in ("channels", "channels_backward"):
        return numel / max(1, first.shape[1] if len(first.shape) > 1 else 1)
    if kind == "norm_backward":
        return numel / max(1, first.shape[-1])
    return 0.0


def _touched(kind: str, op: Shape, last: TensorSpec) -> tuple[float, float]:
    """How many rows are touched, and how long each is."""
    index = max([spec for spec in op.inputs[1:] if spec.dtype in ("int64", "int32")], key=_numel, default=last)
    if op.name.split(".")[1].startswith(_BAGS):
        return max(1.0, float(index.numel)), float(last.shape[-1])
    whole = len(index.shape) > 1 and kind != "sorted" and op.name.split(".")[1] not in ("embedding", "index")
    count = max(1.0, float(index.numel) / (max(1, index.shape[-1]) if whole else 1))
    if kind == "gather":
        return count, last.numel / count
    sources = [spec.numel for spec in op.inputs[0 if len(op.inputs) == 2 else 1 :] if spec.dtype not in ("int64", "int32")]
    return count, max(1.0, max(sources, default=1) / count)


def _lists(name: str, op: Shape, device: Device) -> Described:
    """Lists of tensors, updated together."""
    read, written = float(nbytes(op.inputs)), float(nbytes(op.outputs))
    rate, cache = device.memory_bandwidth_bytes_per_second, float(device.l2_bytes or 1)
    count = len(op.inputs)
    sizes = [spec.numel for spec in op.inputs]
    numel = max(1, sum(sizes))
    chunks = sum([-(-size // CHUNK) for size in sizes])
    total = read + (written or 0.6 * read)
    terms = {
        "one": 1e-6, "read": read / rate, "written": written / rate, "over": max(0.0, total - 0.6 * cache) / rate,
        "tensors": count * 1e-8, "chunks": chunks * 1e-8 * reference().sm_count / device.sm_count,
    }  # fmt: skip
    width = DTYPE_BYTES.get(op.inputs[0].dtype, 4) if op.inputs else 4
    values = dict.fromkeys(
        ("out", "shrink", "mixed", "swapped", "strided", "spread", "last", "first_letter", "second_letter", "keeps",
         "lane", "indices", "second", "equal", "align", "dims"), 0.0,
    )  # fmt: skip
    values |= {
        "moved": log(total + 1), "numel": log(numel), "inner": log(numel / max(1, count)), "rows": log(count + 1),
        "inputs": float(count), "width": float(width), "width_out": float(width), "cache": log(total / cache),
        "small": log(min(sizes, default=1) + 1), "kind": _NUMBERS["lists"], "chunks": log(chunks + 1),
    }  # fmt: skip
    if device.backend == "cpu":
        values["lines"] = values["planes"] = 0.0
    return Described("stream", name, "lists", LAUNCH_SECONDS + total / rate, terms, values)
