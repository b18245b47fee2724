"""Ops whose seconds neither FLOPs nor bytes tell, in numbers.

    factor      matrices taken apart or solved, column by column; many small ones side by side or one after another
    sample      pictures read at any place (grid_sample), and gradients added there
    search      places in sorted lists
    count       histograms, distinct values, what a mask selects; most of these the host waits for
    distance    pairs of points
    draw        random choices by weight
    scalar      one number for the host

A profile has laws for them where its probe measured them (`hardware.probe.cases.irregular`); without, `base` is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from foretell.hardware.generations import reference
from foretell.hardware.types import Device
from foretell.price.kernels.shapes import LAUNCH_SECONDS, Described, Shape, flags_of, log, nbytes, short
from foretell.trace.types import TensorSpec
from foretell.units import DTYPE_BYTES

FAMILY = "rare"
_FACTORS: Mapping[str, str] = {
    name: which
    for which, names in {
        "svd": "_linalg_svd linalg_pinv linalg_lstsq", "eigh": "_linalg_eigh", "eig": "linalg_eig _linalg_eigvals",
        "qr": "linalg_qr geqrf ormqr linalg_householder_product", "cholesky": "linalg_cholesky_ex cholesky cholesky_inverse",
        "lu": "_linalg_solve_ex linalg_inv_ex _linalg_det _linalg_slogdet linalg_lu linalg_lu_factor_ex linalg_ldl_factor_ex inverse",
        "triangular": "linalg_solve_triangular triangular_solve cholesky_solve linalg_lu_solve lu_unpack",
        "exponential": "linalg_matrix_exp",
    }.items()
    for name in names.split()
}  # fmt: skip
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(_FACTORS, "factor"),
    **{
        name: kind
        for kind, names in {
            "sample": """grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward cudnn_grid_sampler
                cudnn_grid_sampler_backward _grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward""",
            "search": "searchsorted bucketize",
            "count": """bincount histc _unique _unique2 unique_consecutive unique_dim nonzero masked_select repeat_interleave
                nonzero_static argwhere""",
            "distance": """_cdist_forward _cdist_backward _pdist_forward _pdist_backward _euclidean_dist""",
            "draw": "multinomial randperm",
            "scalar": "_local_scalar_dense _linalg_check_errors item",
        }.items()
        for name in names.split()
    },
}
_ALWAYS, _LOOPED = ("qr", "eig"), ("svd", "eigh")
"""Taken apart one by one: always, or where matrices are larger than a warp is wide."""
KINDS = ("factor", "sample", "search", "count", "distance", "draw", "scalar")
_MASKS = ("bool", "uint8")
_MASKED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
WAITS = frozenset("""
_local_scalar_dense item nonzero masked_select _unique _unique2 unique_dim unique_consecutive argwhere repeat_interleave bincount
_linalg_check_errors _linalg_svd _linalg_eigh linalg_eig linalg_lstsq linalg_pinv
""".split())  # fmt: skip # noqa: SIM905
"""Ops whose result, or whose check for errors, the host waits for."""

SIZED = frozenset({name for name, kind in _KINDS.items() if kind == "count"} - {"bincount", "histc", "nonzero_static"}) | _MASKED
"""Ops whose result is as large as data say, those that pick where the host waits for them."""
ASKED = frozenset({*_KINDS, *_MASKED})
"""All that the host may wait for."""

GUESS: Mapping[str, Mapping[str, float]] = {
    "factor": {"one": 20.0, "columns": 5.0, "side_by_side": 5.0, "work": 30.0, "moved": 4.0, "each": 200.0, "each_column": 15.0},
    "sample": {"one": 3.0, "moved": 1.2, "taps": 0.06, "points": 0.1},
    "sample_back": {"one": 4.0, "moved": 1.2, "taps": 1.5, "points": 0.1},
    "search": {"one": 3.0, "moved": 1.2, "steps": 1.0},
    "count": {"one": 60.0, "moved": 4.0, "sorted": 1.0},
    "distance": {"one": 3.0, "moved": 1.2, "pairs": 1200.0},
    "draw": {"one": 30.0, "moved": 3.0, "sorted": 1.0},
    "scalar": {"one": 15.0},
}
"""What terms count for where nothing was measured: assumed, of the size that an H200 showed."""


def masked(name: str, op: Shape) -> bool:
    """Whether an op picks by a mask: how much that is, the host has to know."""
    return name in _MASKED and any(spec.dtype in _MASKS for spec in op.inputs[1:])


def called(name: str, op: Shape) -> str:
    """What the host calls it: picking by a mask is another thing than picking by numbers."""
    return f"{name}:mask" if name in _MASKED and masked(name, op) else name


def kind_of(name: str, op: Shape) -> str:
    """Which kind of rare op it is; empty for all others."""
    found = _KINDS.get(name, "")
    if name == "repeat_interleave" and not op.name.endswith("Tensor"):
        return ""
    return found or ("count" if masked(name, op) else "")


def waits(name: str, op: Shape) -> bool:
    """Whether the host waits until a GPU has finished it."""
    return (name in WAITS and bool(kind_of(name, op))) or masked(name, op)


def matrices(name: str, op: Shape) -> int:
    """How many matrices an op takes apart; 0 for other ops."""
    shape = max([spec.shape for spec in op.inputs], key=len, default=()) if name in _FACTORS else ()
    return math.prod(shape[:-2]) if len(shape) > 1 else 0


def unmeasured(shapes: Iterable[Shape], families: Collection[str]) -> tuple[str, ...]:
    """Names of rare ops among these, where a profile with these families has no laws for them."""
    if FAMILY in families:
        return ()
    return tuple(sorted({name for op in shapes if (op.inputs or op.outputs) and kind_of(name := short(op.name), op)}))


def rare(name: str, op: Shape, device: Device) -> Described:
    """A rare op in numbers."""
    kind = kind_of(name, op)
    rate, cores = device.memory_bandwidth_bytes_per_second, reference().sm_count / device.sm_count
    moved = nbytes(op.inputs) + nbytes(op.outputs)
    first = max(op.inputs, key=_numel) if op.inputs else op.outputs[0]
    values = {
        "kind": float(KINDS.index(kind)), "moved": log(moved + 1), "numel": log(max(1, first.numel)), "inputs": float(len(op.inputs)),
        "out": log(max(1, op.outputs[0].numel if op.outputs else 1)), "width": float(DTYPE_BYTES.get(first.dtype, 4)),
        "flags": float(sum([1 << place for place, flag in enumerate(flags_of(op.attrs)) if flag])), "whole": float("int" in first.dtype),
    }  # fmt: skip
    key, more, seen = _RULES[kind](name, op, device, cores)
    terms = {"one": 1e-6, "moved": moved / rate, **more}
    group = _FACTORS.get(name) or f"{kind}{'_back' if name.endswith('_backward') else '_product' if name == '_euclidean_dist' else ''}"
    guess = GUESS.get(group) or GUESS[kind]
    base = LAUNCH_SECONDS + sum([value * guess.get(term, 0.0) for term, value in terms.items()])
    own = {f"{group}:{term}": value for term, value in terms.items()}  # nothing is learned of one group from another
    return Described(FAMILY, key, group, base, own, {**values, **seen})


_Found = tuple[str, dict[str, float], dict[str, float]]
"""Key, terms beside bytes, features."""


def _numel(spec: TensorSpec) -> int:
    return spec.numel


def _factor(name: str, op: Shape, device: Device, cores: float) -> _Found:
    matrices = [spec for spec in op.inputs if len(spec.shape) > 1]
    a = matrices[1 if name == "cholesky_solve" and len(matrices) > 1 else 0]
    rows, columns = a.shape[-2:]
    batch, least, most = math.prod(a.shape[:-2]), min(rows, columns), max(rows, columns)
    right = matrices[-1].shape[-1] if len(matrices) > 1 and name != "cholesky_solve" else matrices[0].shape[-1] if len(matrices) > 1 else 0
    flags = flags_of(op.attrs)
    vectors = not flags or flags[-1]
    work = 2.0 * batch * (most * least * least + least * least * right)
    waves, which = math.ceil(batch / device.sm_count), _FACTORS[name]
    terms = {"work": work / device.peak("float32")}
    if which in _ALWAYS or (which in _LOOPED and most > 32):
        each = {"each": 1e-6, "each_column": least * 1e-6, "each_square": least * least * 1e-8, "each_row": most * 1e-7}
        terms |= {term: batch * value for term, value in each.items()}
    else:
        terms |= {
            "columns": least * 1e-6, "side_by_side": waves * least * 1e-6, "cubes": batch * least**3 * 1e-11 * cores,
            "squares": waves * least * most * 1e-9,
        }  # fmt: skip
    seen = {
        "batch": log(batch), "least": log(least), "most": log(most), "right": log(right + 1), "work": log(work), "vectors": float(vectors),
        "small": float(most <= 32), "op": float(list(_FACTORS).index(name)),
    }  # fmt: skip
    size = "small" if most <= 32 else "large"
    how = "" if which in _ALWAYS else f":{size}" if which in _LOOPED else f":{size}:{'many' if batch > 1 else 'one'}"
    return f"{name}{how}{'' if vectors else ':values'}", terms, seen


def _sample(name: str, op: Shape, device: Device, cores: float) -> _Found:
    backward = "backward" in name
    result = op.inputs[0] if backward else op.outputs[0]
    source = op.inputs[1] if backward else op.inputs[0]
    channels = result.shape[1]
    points = result.numel / max(1, channels)
    dims = len(result.shape) - 2
    whole = [value for value in op.attrs if type(value) is int]
    nearest = bool(whole) and whole[0] == 1
    taps = 1 if nearest else 2**dims
    low = DTYPE_BYTES.get(source.dtype, 4) < 4
    wanted = flags_of(op.attrs)[-2:] if backward and len(flags_of(op.attrs)) > 2 else [True, True]
    terms = {
        "points": points * 1e-9 * cores, "taps": points * channels * taps * 1e-11 * cores, "deep": channels * 1e-9,
        "filled": source.nbytes / device.memory_bandwidth_bytes_per_second if backward else 0.0,
    }  # fmt: skip
    seen = {
        "points": log(points), "channels": log(channels), "taps": float(taps), "dims": float(dims), "backward": float(backward),
        "near": log(source.numel / max(1, math.prod(source.shape[:2]))), "edge": float(whole[1]) if len(whole) > 1 else 0.0,
    }  # fmt: skip
    asked = "" if not backward or all(wanted) else ":input" if wanted[0] else ":grid"
    return f"{name}:{'nearest' if nearest else 'linear'}:{'low' if low else 'full'}{asked}", terms, seen


def _search(name: str, op: Shape, device: Device, cores: float) -> _Found:
    asked = max(1, op.outputs[0].numel)
    table = op.inputs[0 if name == "searchsorted" else -1]
    length = table.shape[-1] if table.shape else 1
    steps = asked * log(length + 1)
    terms = {"elements": asked * 1e-12 * cores, "steps": steps * 1e-11 * cores}
    return name, terms, {"asked": log(asked), "length": log(length), "table": log(table.nbytes + 1)}


def _count(name: str, op: Shape, device: Device, cores: float) -> _Found:
    many = max(1, op.inputs[0].numel if not masked(name, op) else max([s.numel for s in op.inputs if s.dtype in _MASKS]))
    found = op.outputs[0].numel if op.outputs else 1
    terms = {"elements": many * 1e-12 * cores, "sorted": many * log(many + 1) * 1e-12 * cores, "found": found * 1e-12 * cores}
    seen = {"many": log(many), "found": log(found + 1), "op": float(sum(map(ord, name)) % 97)}
    extra = sum(flags_of(op.attrs)[-2:]) if name in ("_unique2", "unique_consecutive") else 0
    return f"{name}:{'mask' if masked(name, op) else len(op.inputs) + extra}", terms, seen


def _distance(name: str, op: Shape, device: Device, cores: float) -> _Found:
    back = name.endswith("_backward")
    points = [spec for spec in op.inputs if len(spec.shape) > 1][1 if back else 0 :][:2]
    left, right = points[0], points[-1]
    width = max(1, left.shape[-1])
    pairs = left.numel / width * (right.shape[-2] if name.startswith(("_cdist", "_eucl")) else left.shape[-2] / 2)
    norm = next((float(value) for value in op.attrs if isinstance(value, float)), 2.0)
    terms = {
        "work": 3 * pairs * width / device.peak("float32"), "pairs": pairs * 1e-12 * cores, "deep": right.shape[-2] * 1e-9 if back else width * 1e-9,
        "atoms": pairs * width * 1e-12 * cores if back else 0.0,
    }  # fmt: skip
    seen = {"pairs": log(pairs), "points": log(width), "norm": norm, "backward": float(back), "rows": log(left.shape[-2])}
    return f"{name}:{norm:g}", terms, seen


def _draw(name: str, op: Shape, device: Device, cores: float) -> _Found:
    out = op.outputs[0].numel if op.outputs else 1
    many = max(1, op.inputs[0].numel if op.inputs else out)
    inner = op.inputs[0].shape[-1] if op.inputs and op.inputs[0].shape else many
    again = any(flags_of(op.attrs)) and out * inner != many
    terms = {
        "elements": many * 1e-12 * cores, "sorted": many * log(many + 1) * 1e-12 * cores, "rows": many / inner * 1e-9 * cores,
        "lane": inner * 1e-9, "found": out * 1e-9 * cores,
    }  # fmt: skip
    return f"{name}:{'again' if again else 'once'}", terms, {"many": log(many), "inner": log(inner), "found": log(out + 1)}


def _scalar(name: str, op: Shape, device: Device, cores: float) -> _Found:
    return name, {}, {}


_RULES = {
    "factor": _factor, "sample": _sample, "search": _search, "count": _count, "distance": _distance, "draw": _draw, "scalar": _scalar,
}  # fmt: skip
