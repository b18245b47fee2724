"""Recurrent layers as cuDNN runs them: recorded op lists, and 24 layers measured alone on an H200.

`tests/data/oplists/unmeasured` holds dispatch traces of real steps whose memory was not measured in the same
configuration. `tests/data/rnn_h200.json` holds, for every layer, the reserve `_cudnn_rnn` returned and what allocated
memory gained and reached, in bytes, across `_cudnn_rnn` and across `_cudnn_rnn_backward` (torch 2.11, cuDNN 9.19).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.price.kernels.scratch import stages
from foretell.simulate.memory.replay import Replay, Sizes
from foretell.trace.cuda.rnn import DROPOUT_STATE_BYTES
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.types import Op, Trace
from foretell.zoo import ENTRIES
from foretell.zoo.listing.classics import ENTRIES as CLASSICS

DATA = Path(__file__).parents[1] / "data"
RECORDED = sorted((DATA / "oplists" / "unmeasured").glob("*.json.gz"))
LAYERS: list[dict[str, Any]] = json.loads((DATA / "rnn_h200.json").read_text())
MIB = 1 << 20
FORWARD, BACKWARD = "aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"


def read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def where(model: str) -> str:
    return model.replace("tests/data", str(DATA))


# ---------------------------------------------------------------- op lists


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name[:-8])
def test_step_equals_the_recorded_cuda_step(path: Path) -> None:
    golden = read(path)
    source = Source(model=where(golden["model"]), **golden["source"])
    trace = capture(lambda: load(source), Recipe(**golden["recipe"]), release=golden["torch"])
    names = [name for name, times in trace.schedule["steady_step"] for _ in range(times) if name != "zero_grad"]
    ours = [
        (op.name, [ref.spec for ref in op.inputs], [ref.spec for ref in op.outputs])
        for name in names
        for op in trace.programs[name].ops
        if not op.name.startswith("foretell.")
    ]
    specs = [(tuple(shape), dtype) for shape, dtype in golden["specs"]]
    for position, (mine, (name, inputs, outputs)) in enumerate(zip(ours, golden["ops"], strict=True)):
        real = (golden["names"][name], [specs[i] for i in inputs], [specs[i] for i in outputs])
        assert mine == real, f"op {position}"


def test_every_classic_of_the_zoo_is_recorded() -> None:
    recorded = {read(path)["model"] for path in (DATA / "oplists").rglob("*.json.gz")}
    families = {entry.module for entry in CLASSICS}
    assert len(families) == 17
    assert {ENTRIES[model].module for model in recorded if model in ENTRIES} == families


# ---------------------------------------------------------------- layers alone


def traced(row: dict[str, Any], *, train: bool = True) -> Trace:
    dtype = getattr(torch, row["dtype"])

    def build() -> Workload:
        layer = getattr(nn, row["layer"])(
            row["inputs"], row["hidden"], row["layers"], batch_first=row["batch_first"],
            bidirectional=row["both_ways"], dropout=row["dropout"], dtype=dtype,
        )  # fmt: skip
        first, second = (row["batch"], row["time"]) if row["batch_first"] else (row["time"], row["batch"])
        return Workload(layer, (torch.empty(first, second, row["inputs"], dtype=dtype),), loss)

    precision = "bf16-autocast" if row["autocast"] else "fp32"
    return capture(build, Recipe(precision=precision, mode="train" if train else "infer"))


def loss(output: tuple[Tensor, ...], _: Any) -> Tensor:
    return output[0].float().sum()


def find(trace: Trace, name: str) -> Op:
    (found,) = {op for program in trace.programs.values() for op in program.ops if op.name == name}
    return found


def called(row: dict[str, Any]) -> str:
    return "-".join(str(value) for key, value in row.items() if key not in ("reserve", "forward", "backward"))


def rounded(sizes: Any) -> int:
    return sum(-(-size // 512) * 512 for size in sizes)


def reached(trace: Trace, op: Op) -> tuple[int, int]:
    """What the op takes at its highest, and how much more the allocator may hand out: 1 MiB for every large block."""
    made = [trace.storages[number].nbytes for number in op.allocates]
    *early, late = stages(op, (9, 0))
    heights = [[*made[: at + 1], *buffers] for at, buffers in enumerate(early)] + [[*made, *late]]
    highest = max(heights, key=rounded)
    return rounded(highest), MIB * sum(size > MIB for size in highest)


@pytest.fixture(scope="module", params=LAYERS, ids=called)
def layer(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Trace]:
    return request.param, traced(request.param)


def test_reserve_is_what_was_measured(layer: tuple[dict[str, Any], Trace]) -> None:
    row, trace = layer
    assert find(trace, FORWARD).outputs[3].spec == ((row["reserve"],), "uint8")


def test_memory_of_the_op_alone(layer: tuple[dict[str, Any], Trace]) -> None:
    """Within the allocator's own slack below the measurement, and at most 5 % above it."""
    row, trace = layer
    for name in ("forward", "backward"):
        predicted, slack = reached(trace, find(trace, FORWARD if name == "forward" else BACKWARD))
        assert row[name][1] - slack <= predicted <= 1.05 * row[name][1], name


def test_what_the_op_leaves_behind(layer: tuple[dict[str, Any], Trace]) -> None:
    row, trace = layer
    for name in ("forward", "backward"):
        op = find(trace, FORWARD if name == "forward" else BACKWARD)
        kept = [trace.storages[number].nbytes for number in op.allocates]
        slack = MIB * sum(size > MIB for size in kept) + 32 * 1024  # small blocks of a full pool are not split either
        assert row[name][0] - slack <= rounded(kept) <= row[name][0]


# ---------------------------------------------------------------- what lives how long

SMALL = {
    "layer": "LSTM", "batch": 4, "time": 6, "inputs": 8, "hidden": 16, "layers": 2, "both_ways": False, "dropout": 0.0,
    "dtype": "float32", "autocast": False, "batch_first": True,
}  # fmt: skip


def test_weights_in_one_buffer_cost_nothing() -> None:
    trace = traced(SMALL)
    op = find(trace, FORWARD)
    buffer = op.outputs[-1]
    assert buffer.spec.shape == (sum(ref.spec.numel for ref in op.inputs[1:9]),)
    assert buffer.storage in trace.resident
    weights = sum(trace.storages[number].nbytes for number in trace.resident if trace.storages[number].role == "parameter")
    assert weights == 4 * trace.meta["parameters"]


def test_bf16_weights_are_gathered_by_every_call_and_kept_for_backward() -> None:
    trace = traced({**SMALL, "dtype": "bfloat16"})
    forward, backward = find(trace, FORWARD), find(trace, BACKWARD)
    buffer = forward.outputs[-1].storage
    assert buffer in forward.allocates and trace.storages[buffer].saved
    assert buffer in {ref.storage for ref in backward.inputs}


def test_autocast_runs_in_fp16_whatever_it_is_asked_for() -> None:
    trace = traced({**SMALL, "autocast": True})
    assert {ref.spec.dtype for ref in find(trace, FORWARD).inputs} == {"float16"}
    copies = [op for op in trace.programs["micro_first"].ops if op.name == "aten.copy_.default"]
    assert len(copies) == 8


def test_evaluation_keeps_no_reserve() -> None:
    assert find(traced(SMALL, train=False), FORWARD).outputs[3].spec.numel == 0


def test_dropout_state_is_made_once_and_stays() -> None:
    trace = traced({**SMALL, "dropout": 0.2})
    held = [number for number, storage in trace.storages.items() if storage.nbytes == DROPOUT_STATE_BYTES]
    assert len(held) == 1
    born = [op.name for program in trace.programs.values() for op in program.ops if held[0] in op.allocates]
    died = [op.name for program in trace.programs.values() for op in program.ops if held[0] in op.frees]
    assert len(born) == 1 and not died
    replay = Replay(trace, Sizes((9, 0), 0))
    replay.start()
    for name in ("first_step", "steady_step"):
        replay.run(name)
        assert held[0] in replay.blocks
    assert not [s for s in traced(SMALL).storages.values() if s.nbytes == DROPOUT_STATE_BYTES]


# ---------------------------------------------------------------- what a plain run does and a dispatch mode hides


def test_bias_after_a_product_is_added_in_place() -> None:
    """`linear` splits into product and sum where its input is not contiguous; only a dispatch mode sees a new tensor."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.transpose(0, 1))

    trace = capture(lambda: Workload(Model(), (torch.empty(4, 6, 8),), lambda output, _: output.sum()), Recipe(precision="fp32"))
    forward = [op for op in trace.programs["micro_first"].ops if op.phase == "forward"]
    (product,) = [op for op in forward if op.name == "aten.mm.default"]
    (added,) = [op for op in forward if op.name == "aten.add.Tensor"]
    assert not added.allocates
    assert added.outputs[0].storage == product.outputs[0].storage


def test_reserve_is_made_while_the_workspace_is_held() -> None:
    trace = traced({**SMALL, "dtype": "bfloat16"})
    op = find(trace, FORWARD)
    assert op.allocates[-1] == op.outputs[3].storage
    replay = Replay(trace, Sizes((9, 0), 0))
    sizes: list[int] = []
    plain = replay.allocator.malloc
    replay.allocator.malloc = lambda size, *rest: (sizes.append(size), plain(size, *rest))[1]  # type: ignore[method-assign]
    replay.start()
    replay.run("first_step")
    (workspace,) = [size for size in stages(op, (9, 0))[0] if size > MIB]
    reserve = trace.storages[op.allocates[-1]].nbytes
    assert sizes[sizes.index(workspace) + 1] == reserve
