"""The trees that say what cuDNN takes for itself in a convolution, grown from rows measured on an H200.

    python benchmarks/convolutions.py                 grow from the half `fit` and write foretell/price/kernels/convolutions.json
    python benchmarks/convolutions.py --tell          hold the stored trees against both halves, by class

data/convolutions.jsonl.gz has a row for every distinct convolution, forward and backward, of 500 models of the corpus,
each called alone (torch 2.11, cuDNN 9.19) on contiguous tensors, or channels_last ones where the layout has an l:
[op, dtype, x, w, y, attrs, half, family, bytes above inputs and results at the peak]. A family of models is in one half
alone; a third part, `grid`, is what thresholds were read off by hand: a grid of shapes, and recorded steps of the zoo. Trees
are grown from `fit` and `grid`, each
from rows drawn with replacement: at a node, of some features, the question that saves most of what its rows lose by the
best recipe for each side.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from foretell.hardware.generations import multiprocessors  # noqa: E402
from foretell.price.kernels import scratch  # noqa: E402
from foretell.price.kernels.convolutions import TREES, features, kind, recipes, voted  # noqa: E402
from foretell.price.kernels.scratch_data import Convolution  # noqa: E402
from foretell.trace.types import Op, Ref, TensorSpec  # noqa: E402

ROWS = HERE / "data" / "convolutions.jsonl.gz"
MIB = 1 << 20
CAPABILITY = (9, 0)
UNDER = 2.0
"""A byte too few costs so much more than one too many."""
MOST = 3.0
"""A row's loss is counted in shares of its copies, up to so many."""
COUNT, DEPTH, LEAST, WORTH, SHARE = 15, 8, 4, 0.2, 0.4
"""Trees, questions one after the other, rows of a leaf, what a question must save, features that a node may ask about."""
BY_HAND = ["by hand"]
FOLDS, BETTER = 5, 0.9
"""Trees are kept for a kind of convolution if families left out lose less than so much of what they lose by hand."""


class Row(NamedTuple):
    op: Op
    half: str
    family: str
    measured: int


def read() -> list[Row]:
    with gzip.open(ROWS, "rt") as file:
        return [row_of(json.loads(line)) for line in file]


def row_of(row: list[Any]) -> Row:
    kind, dtype, x, w, y, attrs, half, family, measured = row
    spec = {name: TensorSpec(tuple(shape), dtype) for name, shape in (("x", x), ("w", w), ("y", y))}
    backward = kind == "b"
    inputs = [spec[name] for name in ("yxw" if backward else "xw")]
    bias = TensorSpec((y[1],), dtype)
    flags = [value for value in attrs if not isinstance(value, str)]
    made = [s for s, asked in zip((spec["x"], spec["w"], bias), flags[-4:-1], strict=True) if asked] if backward else [spec["y"]]
    name = "aten.convolution_backward.default" if backward else "aten.convolution.default"
    refs = [tuple(Ref(i, s) for i, s in enumerate(specs)) for specs in (inputs, made)]
    return Row(Op(name, *refs, "", "backward" if backward else "forward", None, attrs=tuple(attrs)), half, family, measured)


def convolution(op: Op) -> Convolution:
    specs = [ref.spec for ref in op.inputs]
    if "backward" in op.name:
        return Convolution(specs[1], specs[2], specs[0], op.attrs, True, weight_last="strided:2" in op.attrs)
    return Convolution(specs[0], specs[1], op.outputs[0].spec, op.attrs, False, weight_last="strided:1" in op.attrs)


def predicted(op: Op) -> int:
    """Highest bytes above the results, as the rules have it: a stage may come before the last results are made."""
    return above(op, scratch.stages(op, CAPABILITY))


def above(op: Op, found: tuple[tuple[int, ...], ...]) -> int:
    made = [_rounded(ref.spec.nbytes) for ref in op.outputs]
    return max(0, *(sum(map(_rounded, stage)) - (sum(made[i + 1 :]) if len(found) > 1 else 0) for i, stage in enumerate(found)))


def _rounded(size: int) -> int:
    return -(-size // 512) * 512


# ---------------------------------------------------------------------------------------------- growing


def table(rows: list[Row]) -> tuple[list[str], np.ndarray, list[str], np.ndarray]:
    """Features of every row, and what every recipe would cost it."""
    asked, losses = [], []
    for row in rows:
        c = convolution(row.op)
        losses.append([lost(row, c, size) for size in recipes(c).values()])
        asked.append(list(features(c).values()))
    return list(features(c)), np.array(asked, dtype=float), list(recipes(c)), np.array(losses)


def beside(op: Op, c: Convolution) -> tuple[int, int]:
    """Copies of inputs that are alive with the workspace, and the staging of the bias's sum, which comes after."""
    if not c.backward:
        return c.source.nbytes if "strided:0" in op.attrs and not c.channels_last else 0, 0
    staging = scratch._bias_staging(op, c, multiprocessors(CAPABILITY)) if c.mask[2] else ()
    return sum(scratch._gradient(op)[1]), sum(staging)


def grow(names: list[str], x: np.ndarray, known: list[str], loss: np.ndarray, chance: np.random.Generator, depth: int = DEPTH) -> Any:
    """A node: the name of the recipe that costs least, or the best question and a node for either answer."""
    total = loss.sum(axis=0)
    leaf, best = known[int(total.argmin())], (WORTH, -1, 0.0)
    if depth and len(x) >= 2 * LEAST:
        for at in chance.choice(len(names), int(SHARE * len(names)), replace=False):
            order = np.argsort(x[:, at], kind="stable")
            value = x[order, at]
            below = np.cumsum(loss[order], axis=0)[:-1]
            saved = total.min() - below.min(axis=1) - (total - below).min(axis=1)
            number = np.arange(1, len(x))
            saved[(value[1:] == value[:-1]) | (number < LEAST) | (number > len(x) - LEAST)] = -1
            cut = int(saved.argmax())
            if saved[cut] > best[0] + 1e-9:
                best = (float(saved[cut]), int(at), _between(value[cut], value[cut + 1]))
    if best[1] < 0:
        return leaf
    _, at, threshold = best
    low = x[:, at] <= threshold
    sides = [grow(names, x[side], known, loss[side], chance, depth - 1) for side in (low, ~low)]
    return sides[0] if sides[0] == sides[1] and isinstance(sides[0], str) else [names[at], threshold, *sides]


def _between(low: float, high: float) -> float:
    """A short number that parts the two."""
    short = float(f"{(low + high) / 2:.5g}")
    return short if low <= short < high else float((low + high) / 2)


def grown(rows: list[Row]) -> dict[str, Any]:
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        c = convolution(row.op)
        if not (c.depthwise or c.channels_last or not c.mask[1]):
            by_kind[kind(c)].append(row)
    found = {}
    for name, some in sorted(by_kind.items()):
        hand, trees = left_out(some)
        print(f"{name}: families left out lose {hand:.0f} by hand, {trees:.0f} by trees")
        found[name] = forest(some) if trees < BETTER * hand else BY_HAND
    return found


def forest(rows: list[Row]) -> list[Any]:
    names, x, known, loss = table(rows)
    chance = np.random.default_rng(0)
    drawn = [chance.integers(0, len(x), len(x)) for _ in range(COUNT)]
    return [grow(names, x[some], known, loss[some], chance) for some in drawn]


def left_out(rows: list[Row]) -> tuple[float, float]:
    """What rows of families that were left out lose, by hand and by trees grown from the others."""
    total = [0.0, 0.0]
    for fold in range(FOLDS):
        trees = forest([row for row in rows if fold_of(row) != fold])
        for row in rows:
            if fold_of(row) == fold:
                c = convolution(row.op)
                for i, grown_here in enumerate((BY_HAND, trees)):
                    total[i] += lost(row, c, voted(grown_here, features(c), recipes(c)))
    return total[0], total[1]


def fold_of(row: Row) -> int:
    return -1 if row.half == "grid" else int(hashlib.md5(row.family.encode()).hexdigest(), 16) % FOLDS


def lost(row: Row, c: Convolution, size: int) -> float:
    """What a size costs a row, in shares of its copies."""
    copies, bias = beside(row.op, c)
    error = (max(copies + size, bias) - row.measured) / (c.x + c.y + c.w + 2 * MIB)
    return min(MOST, error) if error > 0 else min(MOST, -UNDER * error)


# ---------------------------------------------------------------------------------------------- telling


def kind_of(row: Row) -> str:
    c = convolution(row.op)
    shape = "depthwise" if c.depthwise else "groups" if c.groups > 1 else "1x1" if c.kernel == 1 else "full"
    way = ("backward" if c.backward else "forward") + (" channels_last" if c.channels_last else "")
    return f"{way}, {len(c.source.shape) - 2}-d, {c.source.dtype}, {shape}{', transposed' if c.transposed else ''}"


def tell(rows: list[Row], said: list[int]) -> None:
    """Rows off by more than 2 MiB either way and by how much, of either half and by class of the sealed one."""
    for half in ("sealed", "fit", "grid"):
        found: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0, 0.0])
        for row, value in zip(rows, said, strict=True):
            if row.half == half:
                for counts in (found[kind_of(row)], found["all"]):
                    off = (value - row.measured) / MIB
                    counts[0] += 1
                    if abs(off) > 2:
                        counts[1 if off < 0 else 3] += 1
                        counts[2 if off < 0 else 4] += abs(off)
        for name, (n, low, short, high, over) in sorted(found.items(), key=lambda item: -item[1][1] - item[1][3]):
            if half == "sealed" or name == "all":
                print(f"{half:6s} {name:60s} {n:5.0f}  under {low:4.0f} {short:7.0f} MiB  over {high:4.0f} {over:7.0f} MiB")


def _lines(found: list[Any]) -> str:
    return ",\n".join("  " + json.dumps(tree, separators=(",", ":")) for tree in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tell", action="store_true")
    rows = read()
    if not parser.parse_args().tell:
        found = grown([row for row in rows if row.half != "sealed"])
        about = "grown by benchmarks/convolutions.py from the half `fit` of its rows and the grid: torch 2.11, cuDNN 9.19, an H200"
        text = ",\n".join(f' {json.dumps(name)}: [\n{_lines(grown_here)}\n ]' for name, grown_here in found.items())
        TREES.write_text(f'{{"about": {json.dumps(about)},\n"trees": {{\n{text}\n}}}}\n')
    tell(rows, [predicted(row.op) for row in rows])


if __name__ == "__main__":
    main()
