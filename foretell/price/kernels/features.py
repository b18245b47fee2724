"""What an op is, in numbers: its family, what its seconds are a sum of, and features that refine the sum.

    gemm        products of matrices: tiles over the device's cores, in whole waves
    attention   fused attention, forward and backward, by backend
    convolution products of patches, layout changes, or one filter per channel
    recurrent   cells step by step
    rare        what neither FLOPs nor bytes tell: decompositions, sampling, searching, counting
    stream      everything else: it moves bytes

A law learned from measured rows says how often each term counts, and trees predict log(seconds / law) from the
features, so that what they learn is efficiency and not size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from foretell.hardware.types import Device
from foretell.price.kernels.irregular import kind_of, rare
from foretell.price.kernels.memory_bound import mover
from foretell.price.kernels.products import Product, aligned_bytes, best_tiling, engine_of
from foretell.price.kernels.shapes import (
    LAUNCH_SECONDS,
    Described,
    Shape,
    flags_of,
    letters_of,
    log,
    nbytes,
    short,
    state_of,
    tail,
    two_power,
)
from foretell.trace.types import TensorSpec
from foretell.units import DTYPE_BYTES

__all__ = ["FREE", "Described", "Shape", "describe", "launches", "product_of"]


def describe(op: Shape, device: Device) -> Described | None:
    """Family, terms and features of an op; None for ops that launch nothing."""
    name = short(op.name)
    if name in FREE or not (op.inputs or op.outputs):
        return None
    rule = RULES.get(name) or (rare if kind_of(name, op) else mover)
    try:
        return rule(name, op, device)
    except (IndexError, ZeroDivisionError, ValueError):
        return mover(name, op, device)


FREE = frozenset("""
view _unsafe_view t transpose permute expand slice select unsqueeze squeeze split split_with_sizes detach detach_ alias
as_strided unbind _reshape_alias empty empty_like empty_strided new_empty new_empty_strided unfold diagonal view_as_real
view_as_complex real imag lift_fresh resize_ set_ begin model_end _record_function_enter_new _record_function_enter
_record_function_exit _conj is_same_size chunk expand_as view_as narrow movedim swapaxes flatten unflatten reshape
_neg_view conj numpy_T mT contiguous
""".split())  # fmt: skip # noqa: SIM905
"""Ops that launch nothing."""


def launches(op: Shape) -> bool:
    """Whether a device does anything for this op."""
    return short(op.name) not in FREE


# ---------------------------------------------------------------- products


def product_of(name: str, op: Shape) -> Product:
    """Sizes and layouts of the matrices an op multiplies."""
    first = 1 if name in ("addmm", "baddbmm", "_addmm_activation", "addbmm") else 0
    a, b = op.inputs[first], op.inputs[first + 1]
    letters = letters_of(op.attrs).ljust(first + 2, "c")
    batch = a.shape[0] if len(a.shape) == 3 else 1
    if name in ("_grouped_mm", "_scaled_grouped_mm") and len(a.shape) == 2:
        if len(b.shape) == 2 and op.outputs:  # gradients of weights: the rows of each expert are what is summed over
            batch = op.outputs[0].shape[0]
            return Product(batch, a.shape[-2], b.shape[-1], max(1, a.shape[-1] // batch), letters[0], letters[1])
        batch = b.shape[0] if len(b.shape) == 3 else 1
        return Product(batch, max(1, a.shape[-2] // batch), b.shape[-1], a.shape[-1], letters[0], letters[1])
    n = b.shape[-1] if len(b.shape) > 1 else 1
    return Product(batch, a.shape[-2] if len(a.shape) > 1 else 1, n, a.shape[-1], letters[first], letters[first + 1])


def _gemm(name: str, op: Shape, device: Device) -> Described:
    p = product_of(name, op)
    dtype = op.inputs[-1].dtype if name == "addmm" else op.inputs[0].dtype
    rate = "tf32" if "tf32" in op.attrs else dtype
    width = DTYPE_BYTES.get(dtype, 2)
    engine = engine_of(p, rate, width)
    t = best_tiling(p, engine, rate, width, device)
    left, right = (p.m if p.left == "t" else p.k), (p.k if p.right == "t" else p.n)
    values = {
        "m": log(p.m), "n": log(p.n), "k": log(p.k), "batch": log(p.batch),
        "bound": log(t.computing / t.moving), "out": log(p.batch * p.m * p.n), "lean": log(p.m / p.n),
        "align_m": two_power(p.m), "align_n": two_power(p.n), "align_k": two_power(p.k),
        "left_t": float(p.left == "t"), "right_t": float(p.right == "t"),
        "strided": float(p.left in "sb") + float(p.right in "sb"),
        "inner_left": two_power(left), "inner_right": two_power(right), "aligned": float(aligned_bytes(p, width)),
        "bias": float(name in ("addmm", "_addmm_activation")), "width": float(width),
        "half": float(dtype == "float16"), "tf32": float(rate == "tf32"), "grouped": float("grouped" in name),
        "eight": float("scaled" in name), "complex": float(dtype.startswith("complex")),
        "rows": float(t.rows), "columns": float(t.columns), "parts": log(t.parts), "waves": log(t.waves),
        "tail": tail(t.waves), "operands": two_power(left | right), "rival": log(t.rival / t.computing),
        "moved": log((nbytes(op.inputs[:3]) + nbytes(op.outputs)) / float(device.l2_bytes or 1)),
    }  # fmt: skip
    for a, b in ((128, 128), (128, 256), (256, 128)):
        waves = p.batch * math.ceil(p.m / a) * math.ceil(p.n / b) / device.sm_count
        values[f"waves_{a}x{b}"], values[f"tail_{a}x{b}"] = log(waves), tail(waves)
    terms = {"tiling": t.seconds, "one": 1e-6}
    if "grouped" in name:
        terms["each"] = p.batch * 1e-7
    if device.backend == "cpu":  # no tiles that a small matrix would leave empty: each product for itself
        terms |= {
            "exact": 2.0 * p.batch * p.m * p.n * p.k / device.peak("float32"), "each": p.batch * 1e-7, "rows": p.batch * (p.m + p.n) * 1e-9,
            "moved": (nbytes(op.inputs[:3]) + nbytes(op.outputs)) / device.memory_bandwidth_bytes_per_second,
        }  # fmt: skip
    result_only = aligned_bytes(p, width) < 16 <= min(16, min(left & -left, right & -right) * width)
    what = "grouped" if "grouped" in name else "batched" if p.batch > 1 else name
    key = f"{engine}:{what}:{'result' if result_only else 'all'}"
    return Described("gemm", key, engine, t.seconds, terms, values)


# ---------------------------------------------------------------- attention

TILE = 128
"""Queries and keys that a block of fused attention takes at a time."""


def _attention(name: str, op: Shape, device: Device) -> Described:
    backward = name.endswith("_backward")
    first = 1 if backward else 0
    q, k, v = op.inputs[first : first + 3]
    b, h, t, size = q.shape
    s, heads = k.shape[2], b * h
    causal = any(flags_of(op.attrs))
    padded = max(32, -(-max(size, v.shape[-1]) // 32) * 32)
    down, across = -(-t // TILE), -(-s // TILE)
    pairs = down * across if not causal else down * (across - (min(down, across) - 1) / 2)
    factor = 2.5 if backward else 1.0
    peak, cores = device.peak(q.dtype), device.sm_count
    rate = device.memory_bandwidth_bytes_per_second
    window, near = _window(op.attrs, s)
    scores = heads * t * s * (0.5 if causal else 1.0) * near
    flops = scores * 2 * (size + v.shape[-1]) * factor
    moved = nbytes(op.inputs) + nbytes(op.outputs)
    blocks, rounds = (heads * across, down) if backward else (heads * down, across)
    each = TILE * TILE * 4 * padded * factor / peak * cores
    waves = blocks / cores
    terms = {
        "one": 1e-6, "moved": moved / rate, "blocks": waves * 1e-6, "pairs": heads * pairs * near / cores * each,
        "waves": math.ceil(waves) * rounds * each * (0.5 if causal else 1.0) * near,
        "scores": heads * pairs / cores * TILE * TILE * 1e-10, "exact": flops / peak,
    }  # fmt: skip
    if backward and "efficient" in name:  # a block for each head goes over all keys
        turns = math.ceil(heads / cores) * -(-s // 64)
        terms |= {"heads": math.ceil(heads / cores) * down * across * each * near, "turns": turns * 1e-5, "long_turns": turns * s / 4096 * 1e-5}
    mask = _mask(op.inputs[first + 3 :], t, s, op.inputs[0].shape)
    if mask:
        terms |= {"moved": (moved - mask.nbytes) / rate, "masked": heads * t * s * DTYPE_BYTES.get(mask.dtype, 2) / rate}
    if device.backend == "cpu":  # which leaves no part of a tile empty
        terms = {"one": 1e-6, "moved": moved / rate, "exact": flops / peak, "each": heads * 1e-6, "softmax": scores * 1e-9, "lines": heads * t * 1e-8}
    values = {
        "backward": float(backward), "flash": float("flash" in name), "efficient": float("efficient" in name),
        "heads": log(heads), "groups": log(h / k.shape[1]), "t": log(t), "s": log(s), "size": float(size),
        "causal": float(causal), "width": float(DTYPE_BYTES.get(q.dtype, 2)), "half": float(q.dtype == "float16"),
        "intensity": log(flops / moved), "align_t": two_power(t), "align_s": two_power(s), "blocks": log(waves),
        "tail": tail(waves), "rounds": log(rounds), "padded": padded / size,
        "waste": log(heads * pairs * TILE * TILE / scores), "inputs": float(len(op.inputs)),
        "dropout": float(any(isinstance(a, float) and a > 0 for a in op.attrs)),
        "strided": float(sum(letter in "sb" for letter in letters_of(op.attrs))),
    }  # fmt: skip
    if any(isinstance(attr, str) and attr.startswith("kernel:") for attr in op.attrs):
        values |= {"window": log(window), "near": near, "cached": float(DTYPE_BYTES.get(k.dtype, 2))}
    base = LAUNCH_SECONDS + max(flops / peak, moved / rate)
    key = f"{name}:{'full' if q.dtype == 'float32' else 'low'}{':masked' if mask else ''}"
    return Described("attention", key, "backward" if backward else "forward", base, terms, values)


PAGED = {(8, 0): (14e-6, 0.65)}
PAGED_USUAL = (10e-6, 0.85)
"""Of attention over pages: what a call takes however little it reads, and the share of the memory's rate that reading reaches; an A100's and
all others'. From decode attention of vLLM's kernels, 4,400 public rows in bf16."""


def _paged(name: str, op: Shape, device: Device) -> Described:
    """One new token of each sequence against all that its pages hold: queries (sequences, heads, size), keys (sequences, heads, tokens, size)."""
    q, k, _ = op.inputs
    flops = 4 * q.shape[0] * q.shape[1] * k.shape[2] * q.shape[2]
    moved = nbytes(op.inputs) + nbytes(op.outputs)
    least, rate = PAGED.get(device.compute_capability or (0, 0), PAGED_USUAL)
    base = least + max(moved / (rate * device.memory_bandwidth_bytes_per_second), flops / device.peak(q.dtype))
    return Described("paged attention", name, "", base, {}, {})


def _window(attrs: Sequence[object], keys: int) -> tuple[int, float]:
    """Keys that a query sees at most, and the share of causal scores that leaves."""
    asked = next((int(attr[7:]) for attr in attrs if isinstance(attr, str) and attr.startswith("window:")), keys)
    seen = min(asked, keys)
    return seen, seen / keys * (2 - seen / keys)


def _mask(others: Sequence[TensorSpec], t: int, s: int, result: tuple[int, ...]) -> TensorSpec | None:
    """What is added to every score, once for each head: the operand of queries by keys, if there is one."""
    return next((spec for spec in others if len(spec.shape) > 1 and spec.shape[-2:] == (t, s) and spec.shape != result), None)


# ---------------------------------------------------------------- convolutions


SMALL, WIDE = 9, 25
"""Taps of a 3x3 filter and of a 5x5 one."""
OWN_GROUPS, OWN_WIDTHS = 8, (4, 8, 16, 32)
"""Groups, and channels of each, that cuDNN has kernels of their own for."""


def _convolution(name: str, op: Shape, device: Device) -> Described:
    backward = name.endswith("_backward")
    source, weight = (op.inputs[1], op.inputs[2]) if backward else (op.inputs[0], op.inputs[1])
    result = op.inputs[0] if backward else op.outputs[0]
    flags = flags_of(op.attrs)
    turned = bool(flags and flags[0])
    wanted = flags[1:3] if backward and len(flags) >= 4 else [True, True]
    last = bool(flags[-1]) if flags else False
    groups = max(1, next((a for a in reversed(op.attrs) if type(a) is int), 1))
    n, cin, cout = source.shape[0], source.shape[1], result.shape[1]
    near, places = math.prod(source.shape[2:]), math.prod(result.shape[2:])
    taps = math.prod(weight.shape[2:])
    low = source.dtype in ("bfloat16", "float16")
    rate = source.dtype if low else "tf32"
    width = DTYPE_BYTES.get(source.dtype, 4)
    one_each = groups > 1 and groups == cin
    covered = near if turned else places
    flops = 2.0 * n * covered * taps * cin * cout / groups
    bandwidth = device.memory_bandwidth_bytes_per_second
    moved = nbytes((source, weight, result))
    each_in, each_out = -(-cin // groups), -(-cout // groups)
    terms = {"one": 1e-6, "moved": moved / bandwidth * (sum(wanted) if backward else 1)}
    if not last:
        terms["turned"] = moved / bandwidth
    if (len(flags) > 4 and flags[3]) if backward else len(op.inputs) > 2:
        terms["bias"] = 1e-6 + 2 * result.nbytes / bandwidth
    engine = "patches" if device.backend == "cuda" else "plain"
    point = taps == 1 and near == places
    pad = 8 if low and not point else 1
    wide_in, wide_out = -(-each_in // pad) * pad, -(-each_out // pad) * pad
    patches = n * covered
    whole = Product(groups, patches, wide_out, taps * wide_in, "c", "c")
    back = Product(groups, n * near, wide_in, -(-taps * wide_out * covered // near), "c", "c")
    weights = Product(groups, wide_out, taps * wide_in, patches, "c", "c")
    every = (whole,) if not backward else (back, weights)
    jobs = [p for p, asked in zip(every, wanted, strict=False) if asked]
    names = ("product",) if not backward else ("data", "weights")
    labels = [x for x, asked in zip(names, wanted, strict=False) if asked]
    waves = 0.0
    if one_each:
        terms["taps"] = flops / device.peak("float32") * (sum(wanted) if backward else 1)
        terms["lane"] = patches * 1e-9 if backward else 0.0
    else:
        for label, job in zip(labels, jobs, strict=True):
            t = best_tiling(job, engine, rate, width, device)
            terms[label], waves = t.computing, t.waves
        terms["flops"] = flops * len(jobs) / device.peak(rate)
    if device.backend == "cpu":  # which goes over planes and filters one by one
        terms |= {"planes": n * (cin if one_each else cin + cout) * 1e-7, "filters": weight.numel * 1e-9, "edges": n * cin * taps * 1e-8}
    intensity = flops / moved
    values = {
        "backward": float(backward), "asked": float(len(jobs)), "n": log(n), "cin": log(cin), "cout": log(cout),
        "places": log(places), "side": log(source.shape[-1]), "taps": log(taps), "groups": log(groups),
        "stride": log(near / max(1, places)), "m": log(patches), "k": log(taps * each_in), "last": float(last),
        "width": float(width), "intensity": log(intensity), "dims": float(len(weight.shape) - 2),
        "align_in": two_power(each_in), "align_out": two_power(each_out), "align_side": two_power(source.shape[-1]),
        "align_places": two_power(places), "waves": log(waves), "tail": tail(waves), "one_each": float(one_each),
        "source": log(source.nbytes), "result": log(result.nbytes), "weight": log(weight.nbytes),
        "bias": float(len(op.inputs) > 2 and not backward), "turned": float(turned),
    }  # fmt: skip
    what = "each" if one_each else "bundle" if groups > 1 else "point" if point else "patch"
    kind = f"{'backward' if backward else 'forward'}:{what}:{'last' if last else 'first'}"
    base = LAUNCH_SECONDS + max(flops * len(jobs) / device.peak(rate), terms["moved"])
    key = f"{kind}:{'low' if low else 'full'}:{'steps' if near > 1.5 * places else 'all'}"
    key += _depthwise(taps, cin, cout) if one_each else _grouped(taps, groups, each_in, each_out) if groups > 1 else ""
    return Described("convolution", key, kind, base, terms, values)


def _depthwise(taps: int, cin: int, cout: int) -> str:
    """Which of its kernels a depthwise convolution gets: one for few taps, one for many; several filters a channel are a case apart."""
    return ":more" if cout > cin else ":wide" if taps > WIDE else ":five" if taps > SMALL else ""


def _grouped(taps: int, groups: int, each_in: int, each_out: int) -> str:
    """Many small groups of a 3x3 filter have kernels of their own, groups of a 1x1 one have none."""
    own = taps == SMALL and groups >= OWN_GROUPS and each_in == each_out and each_in in OWN_WIDTHS
    return ":own" if own else ":point" if taps == 1 else ""


def _recurrent(name: str, op: Shape, device: Device) -> Described:
    backward = name.endswith("_backward")
    data, state = op.inputs[0], state_of(op.inputs, op.outputs)
    matrices = [spec for spec in op.inputs[1:] if len(spec.shape) == 2]
    layers, batch, hidden = state.shape
    size = sum(spec.numel for spec in matrices)
    tokens = math.prod(data.shape[:-1])
    steps = max(1, tokens // batch)
    gates = max(1, matrices[1].numel // (hidden * hidden)) if len(matrices) > 1 else 4  # low precision: weights lie flat
    flops = 2.0 * tokens * size * (2 if backward else 1)
    moved = nbytes(op.inputs) + nbytes(op.outputs)
    width = DTYPE_BYTES.get(data.dtype, 4)
    low = width < 4
    rate = data.dtype if low else "tf32"
    one = Product(1, batch, gates * hidden, hidden, "c", "t")
    every = Product(1, tokens, gates * hidden, data.shape[-1], "c", "t")
    cell, into = (best_tiling(p, engine_of(p, rate, width), rate, width, device) for p in (one, every))
    bandwidth = device.memory_bandwidth_bytes_per_second
    turns = steps * layers
    terms = {
        "one": 1e-6, "moved": moved / bandwidth, "turns": turns * 1e-6, "cells": turns * cell.computing,
        "fetched": turns * cell.moving, "into": layers * into.seconds, "steps": steps * 1e-6,
        "flops": flops / device.peak(rate), "plain": flops / device.peak("float32"),
    }  # fmt: skip
    values = {
        "backward": float(backward), "tokens": log(tokens), "steps": log(steps), "batch": log(batch),
        "hidden": log(hidden), "layers": float(layers), "width": float(width), "gates": float(gates),
        "weights": log(size), "intensity": log(flops / moved), "align": two_power(hidden), "align_batch": two_power(batch),
        "cell": log(cell.seconds),
    }  # fmt: skip
    base = LAUNCH_SECONDS + max(flops / device.peak(rate), moved / bandwidth) + turns * 5e-6
    key = f"{name}:{'low' if low else 'full'}"
    return Described("recurrent", key, "low" if low else "full", base, terms, values)


RULES: Mapping[str, Callable[[str, Shape, Device], Described]] = {
    **dict.fromkeys(
        ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "linear"),
        _gemm,
    ),
    **dict.fromkeys(
        [f"_scaled_dot_product_{which}_attention{back}" for which in ("flash", "efficient", "cudnn") for back in ("", "_backward")]
        + ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"],
        _attention,
    ),
    "paged_attention": _paged,
    **dict.fromkeys(("convolution", "convolution_backward"), _convolution),
    **dict.fromkeys(("_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), _recurrent),
}  # fmt: skip
