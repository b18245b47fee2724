"""The models of `zoo/listing/perception.py`: structure, memory against a real CPU step, coverage, and each row's trap."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell import zoo
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.price.kernels.features import describe
from foretell.price.kernels.shapes import Shape
from foretell.price.machine import machine
from foretell.price.speeds import alone
from foretell.simulate.memory.replay import peak_live
from foretell.simulate.time.step import plan_time
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu
from foretell.trace.record.step import Workload, compute_loss
from foretell.trace.types import OPTIMIZER, Op, Trace
from foretell.zoo.listing.perception import ENTRIES
from foretell.zoo.perception import boxes, mamba_yolo, rpcanet
from foretell.zoo.science import gauss_rbf
from tests.pure.on_cpu import compare_on_cpu

PLAIN = Recipe(precision="fp32")
CASES = [
    (entry.name, phase)
    for entry in ENTRIES
    if entry.small
    for phase in getattr(zoo.load(entry), "PHASES", ("",))
]
UNTRAINED: dict[tuple[str, str], tuple[str, ...]] = {
    ("recombiner-tiny", "encode"): ("layers", "upsample", *(f"levels.{n}.prior" for n in range(3))),
}
"""Parameters that a phase leaves alone."""
QUIET = {"mamba_yolo-tiny": ("heads.1.sides", "heads.2.sides")}
"""Parameters whose gradient may be all zeros: distances are learned only where an object was assigned."""


pytestmark = pytest.mark.usefixtures("one_thread")


def source(name: str, phase: str = "", micro_batch: int = 2, **overrides: Any) -> Source:
    return Source(model=name, micro_batch=micro_batch, overrides={**overrides, **({"phase": phase} if phase else {})})


@functools.cache
def compared(name: str, phase: str) -> tuple[int, int, Trace]:
    predicted, measured, trace = compare_on_cpu(source(name, phase), PLAIN)
    return predicted, measured, trace


@functools.cache
def traced(name: str, micro_batch: int = 2, recompute: str = "none", **overrides: Any) -> Trace:
    return trace_as_cpu(source(name, micro_batch=micro_batch, **overrides), Recipe(precision="fp32", recompute=recompute))


def peak(trace: Trace) -> int:
    return peak_live(trace, ("first_step", "steady_step"))


def ops(trace: Trace, module: str = "", phase: str = "forward") -> list[Op]:
    return [op for op in trace.programs["micro_first"].ops if op.phase == phase and op.module.startswith(module)]


def work(found: list[Op]) -> int:
    return sum(op.flops or 0 for op in found)


def steady_flops(trace: Trace) -> int:
    return sum(work(list(trace.programs[name].ops)) * times for name, times in trace.schedule["steady_step"])


def model_and_batch(name: str, micro_batch: int = 2, **overrides: Any) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    workload = load(source(name, micro_batch=micro_batch, **overrides))
    assert isinstance(workload.batch, dict)
    return workload.model, workload.batch


# ---------------------------------------------------------------- every model


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_a_step_runs_and_every_trained_parameter_learns(name: str, phase: str) -> None:
    torch.manual_seed(0)
    workload = load(source(name, phase))
    workload.model.train()
    value = compute_loss(workload)
    value.backward()
    assert torch.isfinite(value)
    untrained = UNTRAINED.get((name, phase), ())
    for path, parameter in workload.model.named_parameters():
        if untrained and path.startswith(untrained):
            assert not parameter.requires_grad and parameter.grad is None, path
        else:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), path
            assert parameter.grad.any() or path.startswith(QUIET.get(name, ("-",))), path


LONG = pytest.mark.slow(reason="seconds of a scan op by op, which ssm-tiny has too")
VIEWS = pytest.mark.slow(reason="a step of it runs above; bytes of another are compared")
MARKS = {
    ("mamba_yolo-tiny", ""): LONG, ("recombiner-tiny", "learn"): VIEWS, ("recombiner-tiny", "encode"): VIEWS, ("bev-tiny", ""): VIEWS,
    ("rpcanet-tiny", ""): VIEWS,
}  # fmt: skip


@pytest.mark.parametrize(("name", "phase"), [pytest.param(*case, marks=MARKS.get(case, ())) for case in CASES])
def test_memory_is_that_of_a_real_step_and_every_op_has_a_rule(name: str, phase: str) -> None:
    predicted, measured, trace = compared(name, phase)
    assert predicted == pytest.approx(measured, rel=0.05)
    assert measured > 4e6
    assert trace.ops_without_flop_rule == () and trace.meta["assumed"] == []


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_say_what_they_are(entry: zoo.Entry) -> None:
    assert entry.paper and entry.task and entry.motif and entry.trap
    with torch.device("meta"):
        assert any(True for _ in zoo.load(entry).build(**entry.config).parameters())


# ---------------------------------------------------------------- bev


def test_the_splat_adds_every_point_to_its_cell_and_none_from_outside() -> None:
    model, batch = model_and_batch("bev-tiny", micro_batch=1)
    splat, images = model.splat, batch["images"]
    unproject, shift = batch["unproject"][0, :1], batch["shift"][0, :1]
    cells = splat.cells(unproject, shift)
    outside = cells == splat.grid**2
    assert 0.1 < outside.float().mean() < 0.9
    depths, h, w = splat.frustum.shape[:3]
    logits, features = torch.randn(images.shape[2], depths, h, w), torch.randn(images.shape[2], 3, h, w)
    pooled = splat(logits, features, unproject, shift)
    points = logits.softmax(1)[:, :, None] * features[:, None]
    by_hand = torch.zeros(3, splat.grid**2)
    for camera, depth, y, x in (~outside[0]).nonzero().tolist():
        by_hand[:, cells[0, camera, depth, y, x]] += points[camera, depth, :, y, x]
    torch.testing.assert_close(pooled[0].flatten(1), by_hand)


def test_the_order_of_the_cameras_does_not_matter() -> None:
    model, batch = model_and_batch("bev-tiny", micro_batch=1)
    model.eval()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    inputs = [batch[name] for name in ("images", "unproject", "shift")]
    with torch.no_grad():
        one, other = model(*inputs), model(*(tensor[:, :, order] for tensor in inputs))
    for before, after in zip(one, other, strict=True):
        torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)
    assert one[0].shape == (1, 2, 2, 32, 32) and one[1].shape == (1, 2, 2, 32, 32)


@pytest.mark.slow(reason="a step of the model runs above; bytes of others are compared, with recompute in test_capture.py")
def test_six_cameras_are_as_many_kernels_as_one_and_six_times_the_work() -> None:
    six, one = compared("bev-tiny", "")[2], traced("bev-tiny", cameras=1)
    for phase in ("forward", "backward"):
        assert Counter(op.name for op in ops(six, "", phase)) == Counter(op.name for op in ops(one, "", phase))
    assert work(ops(six, "encoder")) == 6 * work(ops(one, "encoder"))
    assert work(ops(six, "stages")) == work(ops(one, "stages"))


@pytest.mark.slow(reason="a long trace and a real step; prices of scatters are tested in test_scattered.py")
def test_the_splat_is_priced_by_measured_atomics() -> None:
    splat = next(op for op in ops(compared("bev-tiny", "")[2], "splat") if op.name.startswith("aten.index_add"))
    shape = Shape(splat.name, tuple(ref.spec for ref in splat.inputs), tuple(ref.spec for ref in splat.outputs), splat.attrs)
    device = parse("H200").device
    known = machine(device, find_profile(device.name))
    described = describe(shape, device)
    assert known is not None and described is not None and described.kind == "scatter"
    laws = [part.laws[described.key] for part in known.ops.families["stream"].parts]
    assert all(law["atoms"] > 0 for law in laws) and described.terms["atoms"] > 0
    assert splat.flops is not None
    assert known.ops.seconds([shape])[shape] > 10 * splat.flops / device.peak("float32")


# ---------------------------------------------------------------- rpcanet


def test_a_flat_image_has_no_contrast_and_stages_pass_their_memory_on() -> None:
    model, batch = model_and_batch("rpcanet-tiny", micro_batch=1)
    contrast = model.stages[0].objects.contrast
    flat = contrast(torch.full((1, 1, 8, 8), 3.0))
    torch.testing.assert_close(flat, torch.zeros_like(flat), atol=1e-5, rtol=0)
    assert contrast(batch["images"]).abs().max() > 0.01
    model.eval()
    found = model.unroll(batch["images"])
    with torch.no_grad():
        model.stages[0].background.memory.gates.bias.add_(1.0)
    assert not torch.equal(model.unroll(batch["images"])[-1][1], found[-1][1])
    objects, restored = model(batch["images"])
    assert objects.shape == restored.shape == batch["images"].shape


def test_rank_and_sparsity_of_every_stage() -> None:
    model, _ = model_and_batch("rpcanet-tiny", micro_batch=1)
    planted = torch.outer(torch.rand(64) + 0.5, torch.rand(64) + 0.5)[None, None]
    assert rpcanet._rank(planted) == 1.0 and rpcanet._rank(torch.randn(1, 1, 64, 64)) > 30
    spikes = torch.zeros(1, 1, 64, 64)
    spikes[0, 0, 3, 5] = 1.0
    assert rpcanet._sparsity(spikes) == 1 - 1 / 64**2
    found = model.eval().stages_of(planted + spikes)
    assert len(found) == 4 and all(1 <= rank <= 64 and 0 <= sparsity <= 1 for rank, sparsity in found)


@pytest.mark.slow(reason="a step of the model runs above; bytes of others are compared, with recompute in test_capture.py")
def test_recomputing_stages_saves_as_much_as_predicted() -> None:
    kept, measured, trace = compared("rpcanet-tiny", "")
    assert trace.meta["blocks"] == [f"stages.{n}" for n in range(4)]
    again = peak(traced("rpcanet-tiny", recompute="full"))
    really = measure_on_cpu(source("rpcanet-tiny"), Recipe(precision="fp32", recompute="full"))[0]
    assert again == pytest.approx(really, rel=0.05)
    assert again < 0.6 * kept
    assert kept - again == pytest.approx(measured - really, rel=0.05)


@pytest.mark.slow(reason="two more traces of the stages that are compared and computed again above")
def test_memory_is_linear_in_the_stages() -> None:
    peaks = [peak(traced("rpcanet-tiny", stages=stages)) for stages in (2, 3)]
    peaks.append(compared("rpcanet-tiny", "")[0])
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.02)


# ---------------------------------------------------------------- recombiner

FEW = {"image": 32, "signals": 2}


def test_all_networks_at_once_are_what_they_are_one_by_one() -> None:
    found = {}
    for how in ("vmap", "bmm", "loop"):
        model, batch = model_and_batch("recombiner-tiny", how=how, **FEW)
        torch.manual_seed(1)
        images, divergence = model(batch["signals"])
        (images.square().mean() + 1e-4 * divergence).backward()
        found[how] = images, divergence, *(parameter.grad for parameter in model.parameters())
    assert found["loop"][0].shape == (2, 3, 32, 32)
    for how in ("vmap", "bmm"):
        for one, other in zip(found[how], found["loop"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow(reason="three traces of many small networks")
def test_ops_do_not_grow_with_networks_unless_they_run_one_by_one() -> None:
    many = compared("recombiner-tiny", "learn")[2]
    few, more = traced("recombiner-tiny", micro_batch=1, **FEW), traced("recombiner-tiny", image=256)
    names = [[op.name for op in trace.programs["micro_first"].ops] for trace in (few, many, more)]
    assert names[0] == names[1] == names[2]
    assert more.meta["batch"] == [["int64", 2], ["float32", 2, 3, 256, 256]]  # 1024 patches each: 2048 networks
    loop = traced("recombiner-tiny", micro_batch=1, how="loop", **FEW)  # 16 networks
    assert len(loop.programs["micro_first"].ops) > 3 * len(names[0])
    products = [sum(op.flops or 0 for op in trace.programs["micro_first"].ops if "mm" in op.name) for trace in (few, loop)]
    assert products[0] == products[1]


def test_a_group_shares_its_latents_and_a_patch_does_not() -> None:
    model, batch = model_and_batch("recombiner-tiny", image=64, signals=2)
    torch.manual_seed(1)
    before = model(batch["signals"])[0]
    with torch.no_grad():
        model.levels[2].mean[0, 0] += 1.0
    torch.manual_seed(1)
    changed = (model(batch["signals"])[0] != before).any(dim=1)
    assert changed[0, :8, :8].any() and not changed[1].any() and not changed[0, 8:].any() and not changed[0, :, 8:].any()
    with torch.no_grad():
        model.levels[1].mean[0, 3] += 1.0
    torch.manual_seed(1)
    changed = (model(batch["signals"])[0] != before).any(dim=1)
    assert changed[0, 32:, 32:].float().mean() > 0.9 and not changed[0, :32, 32:].any() and not changed[1].any()


def test_frozen_parts_have_no_states_when_signals_are_encoded() -> None:
    trace = compared("recombiner-tiny", "encode")[2]
    states = sum(storage.nbytes for storage in trace.storages.values() if storage.role == OPTIMIZER and storage.nbytes > 8)
    model, _ = model_and_batch("recombiner-tiny", phase="encode")
    posteriors = sum(level.mean.numel() + level.log_std.numel() for level in model.levels)
    assert trace.meta["trainable"] == posteriors and states == 2 * 4 * posteriors


# ---------------------------------------------------------------- mamba_yolo


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    states = [b[:, 0]]
    for step in range(1, a.shape[1]):
        states.append(a[:, step] * states[-1] + b[:, step])
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("chunk", [1, 3, 5, 8, 20, 32])
def test_a_chunked_scan_is_the_sequential_one(chunk: int) -> None:
    torch.manual_seed(0)
    a, b, grad = torch.rand(2, 20, 3, 2).double(), torch.randn(2, 20, 3, 2).double(), torch.randn(2, 20, 3, 2).double()
    found = []
    for scan in (lambda a, b: mamba_yolo.ChunkedScan.apply(a, b, chunk), one_by_one):
        leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
        states = scan(*leaves)
        states.backward(grad)
        found.append((states.detach(), leaves[0].grad, leaves[1].grad))
    torch.testing.assert_close(found[0], found[1])


def test_the_four_ways_come_back_to_their_places() -> None:
    scan = mamba_yolo.SS2D(4, 2, 0)
    for name in ("enter", "mix", "norm", "leave"):
        setattr(scan, name, nn.Identity())
    x = torch.randn(2, 8, 3, 5)
    seen = []
    scan.recur = lambda ways: seen.append(ways) or ways  # type: ignore[method-assign, func-returns-value]
    torch.testing.assert_close(scan(x), 4 * nn.functional.silu(x))
    assert torch.equal(seen[0][:, 1, :3, 0], nn.functional.silu(x)[:, 0, :, 0])  # down the first column


def test_objects_that_are_not_there_do_not_matter_and_outputs_are_as_said() -> None:
    model, batch = model_and_batch("mamba_yolo-tiny")
    output = model.eval()(batch["images"])
    places = 64 + 16 + 4
    assert [tuple(part.shape) for part in output] == [(2, places, 5), (2, places, 4, boxes.BINS), (places, 2), (places, 1)]
    before = mamba_yolo.loss(output, batch)
    batch["boxes"][~batch["there"]] += 7.0
    assert torch.equal(mamba_yolo.loss(output, batch), before)
    batch["boxes"][batch["there"]] += 7.0
    assert not torch.equal(mamba_yolo.loss(output, batch), before)


def test_suppression_keeps_the_best_of_a_heap() -> None:
    logits = torch.full((1, 4, 2), -9.0)
    logits[0, 0, 0], logits[0, 1, 0], logits[0, 2, 1], logits[0, 3, 0] = 3.0, 2.0, 1.0, 0.5
    sides = nn.functional.one_hot(torch.tensor(2), boxes.BINS).float().mul(50).expand(1, 4, 4, -1)
    centres = torch.tensor([[20.0, 20.0], [21.0, 20.0], [20.0, 20.0], [60.0, 60.0]])
    (found,) = boxes.detect((logits, sides, centres, torch.full((4, 1), 8.0)))
    assert found[:, 5].tolist() == [0.0, 1.0, 0.0] and found[0, :4].tolist() == [4.0, 4.0, 36.0, 36.0]
    model, batch = model_and_batch("mamba_yolo-tiny")
    assert len(boxes.detect(model.eval()(batch["images"]), score=0.0)) == 2


@LONG
def test_suppression_is_not_traced() -> None:
    names = {op.name for op in traced("mamba_yolo-tiny").programs["micro_first"].ops}
    assert not [name for name in names if any(word in name for word in ("nonzero", "scalar_dense", "nms", "argsort"))]


@pytest.mark.slow(reason="two traces of a scan op by op; the scan itself is compared above")
def test_a_scan_costs_its_steps_in_a_row_and_not_its_flops() -> None:
    device = parse("H200").device
    known = machine(device, find_profile(device.name))
    assert known is not None
    found = {}
    for chunk in (0, 144):

        def build(chunk: int = chunk) -> Workload:
            return Workload(mamba_yolo.SS2D(16, 4, chunk), {"x": torch.randn(2, 16, 12, 12)}, lambda output, _: output.mean())

        trace = capture(build, PLAIN)
        steps = [op.name for op in ops(trace)].count("aten.addcmul_.default")
        found[chunk] = steps, plan_time(trace, alone(known))[0].step_seconds, steady_flops(trace)
    assert found[0][0] == 11 + 11 and found[144][0] == 143
    assert found[144][1] > 2 * found[0][1] and found[144][2] < found[0][2]


# ---------------------------------------------------------------- gauss_rbf


def test_nearness_is_that_of_the_precision_matrix() -> None:
    model, batch = model_and_batch("gauss_rbf-tiny", micro_batch=1)
    with torch.no_grad():
        model.gaussians.lower.add_(0.1 * torch.randn_like(model.gaussians.lower))
    x, centres, triangle = batch["x"][:, :20].double(), model.gaussians.centres.double(), model.gaussians.triangle().double()
    apart = x.unsqueeze(-2) - centres
    expected = torch.exp(-0.5 * torch.einsum("brci,ij,brcj->brc", apart, triangle @ triangle.T, apart))
    torch.testing.assert_close(model.gaussians(batch["x"][:, :20]).double(), expected, rtol=1e-3, atol=1e-6)
    values, vectors = model.spectrum()
    torch.testing.assert_close((vectors * values) @ vectors.T, (triangle @ triangle.T).float(), rtol=1e-4, atol=1e-5)
    assert (values[:-1] >= values[1:]).all() and model(batch["x"])[0].shape == (1, 2048, 1)


@pytest.mark.slow(reason="150 steps; that every trained parameter learns is tested above")
def test_a_planted_direction_is_found() -> None:
    torch.manual_seed(0)
    planted = torch.zeros(8)
    planted[2], planted[5] = 0.8, 0.6
    model = gauss_rbf.build(features=8, centres=24)
    x = torch.randn(1, 512, 8)
    targets = torch.sin(2 * (x @ planted)).unsqueeze(-1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        gauss_rbf.loss(model(x), {"targets": targets}).backward()
        optimizer.step()
    values, vectors = model.spectrum()
    assert math.degrees(math.acos(min(1.0, abs(float(vectors[:, 0] @ planted))))) < 5
    assert values[1] < 0.05 * values[0]
    assert set(model.importance().topk(2).indices.tolist()) == {2, 5}


@pytest.mark.slow(reason="two larger traces; its memory is compared above")
def test_memory_grows_with_rows_times_centres() -> None:
    base, wide = compared("gauss_rbf-tiny", "")[0], peak(traced("gauss_rbf-tiny", centres=256))
    long = peak(trace_as_cpu(Source(model="gauss_rbf-tiny", micro_batch=2, seq=4096), PLAIN))
    kernel = 2 * 2048 * 128 * 4
    assert (wide - base) / kernel == pytest.approx(round((wide - base) / kernel), abs=0.1) and wide - base > 3 * kernel
    assert long - base == pytest.approx(wide - base, rel=0.25)
