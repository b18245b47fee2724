"""Models of science in the zoo: fields, particles, programs, formulas, scene graphs; each against a real CPU step."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import zoo
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.plan.types import Plan, Residency
from foretell.price.kernels.features import describe
from foretell.price.machine import machine
from foretell.price.time import op_prices, shape_of
from foretell.simulate.memory.replay import peak_live
from foretell.simulate.plan import predict_plan
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import trace_as_cpu
from foretell.trace.record.step import Workload, call_model, compute_loss
from foretell.trace.types import Op, Trace
from foretell.zoo.graphs import gcn_branch, neuroback
from foretell.zoo.listing.science import ENTRIES
from foretell.zoo.scenes import sg_reg
from foretell.zoo.science import pde, pic_step
from tests.pure.on_cpu import compare_on_cpu

SMALL = [entry.name for entry in ENTRIES if entry.small]
H200 = parse("H200").device
FP32 = Recipe(precision="fp32")
REACHES_NO_VARIABLE = {"neuroback-tiny": "attention.meta."}
"""Parts of paths of weights whose gradient is zero, as the module's docstring says."""


pytestmark = pytest.mark.usefixtures("one_thread")


def loaded(name: str, micro_batch: int = 2, **overrides: Any) -> Workload:
    torch.manual_seed(0)
    return load(Source(model=name, micro_batch=micro_batch, overrides=overrides))


@functools.cache
def on_cuda(name: str, micro_batch: int = 2, **overrides: Any) -> Trace:
    source = Source(model=name, micro_batch=micro_batch, overrides=overrides)
    return capture(lambda: load(source), FP32, capability=(9, 0))


@functools.cache
def compared(name: str, recompute: str = "none") -> tuple[int, int, Trace]:
    """Predicted and measured bytes of a step on this CPU."""
    predicted, measured, trace = compare_on_cpu(Source(model=name, micro_batch=2), replace(FP32, recompute=recompute))
    return predicted, measured, trace


def peak_here(name: str, micro_batch: int = 2, **overrides: Any) -> int:
    source = Source(model=name, micro_batch=micro_batch, overrides=overrides)
    return peak_live(trace_as_cpu(source, FP32), ("first_step", "steady_step"))


def ops_of(trace: Trace, *names: str) -> list[Op]:
    return [op for op in trace.programs["micro_first"].ops if op.name.split(".")[1].rstrip("_") in names]


def priced(trace: Trace) -> dict[int, tuple[str, float]]:
    profile = find_profile(H200.name)
    assert profile is not None
    return op_prices(trace, machine(H200, profile))


# ---------------------------------------------------------------- every entry


@pytest.mark.parametrize("name", SMALL)
def test_a_step_runs_and_every_weight_learns(name: str) -> None:
    workload = loaded(name)
    loss = compute_loss(workload)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in workload.model.parameters())
    still = [path for path, weight in workload.model.named_parameters() if not weight.grad.any()]
    assert [path for path in still if REACHES_NO_VARIABLE.get(name, "none") not in path] == []


LONG = pytest.mark.slow(reason="a step of it runs above, and a trace of it, or of a model of the same equations, is read below")
LONGER = ("sg_reg-tiny", "neuroback-tiny", "pde-tiny", "pde-deeponet-tiny", "pde-unet-tiny", "pic_step-tiny")


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG if name in LONGER else ()) for name in SMALL])
def test_memory_is_that_of_a_real_step_and_no_op_is_unknown(name: str) -> None:
    predicted, measured, trace = compared(name)
    assert predicted == pytest.approx(measured, rel=0.05)
    assert measured > 4e6
    assert trace.ops_without_flop_rule == ()
    assert on_cuda(name).ops_without_flop_rule == ()


def test_entries_name_paper_task_motif_and_trap() -> None:
    for entry in ENTRIES:
        assert entry.paper and entry.task and entry.motif and entry.trap, entry.name
        assert entry.small == entry.name.endswith("-tiny")
        assert zoo.get(entry.name) is entry


# ---------------------------------------------------------------- pde


@pytest.mark.parametrize("model", pde.MODELS)
def test_a_channel_that_is_not_measured_has_no_influence(model: str) -> None:
    name = "pde-tiny" if model == "fno" else f"pde-{model}-tiny"
    workload = loaded(name, phase="measured")
    batch = dict(workload.batch)
    assert batch["seen"].tolist() == [[1.0, 1.0, 0.0]] * 2 and batch["known"].tolist() == [1.0, 1.0, 0.0]
    with torch.no_grad():
        before = compute_loss(workload)
        batch["field"][:, 2], batch["targets"][:, 2] = 7.0, -7.0
        assert compute_loss(workload) == before
        batch["field"][:, 1] = 7.0
        assert compute_loss(workload) != before


def test_spectral_convolution_is_one_of_the_whole_field() -> None:
    """Multiplied by the identity on every low mode, a smooth field comes back; and shifts in time and space commute."""
    torch.manual_seed(0)
    layer = pde.SpectralConv3d(2, 3, 5)
    t, y, x = (torch.arange(size) * (2 * torch.pi / size) for size in (8, 16, 16))
    wave = torch.cos(2 * t[:, None, None] - 3 * y[:, None] + 4 * x).expand(1, 2, -1, -1, -1).contiguous()
    noise = torch.randn(1, 2, 8, 16, 16)
    with torch.no_grad():
        moved = layer(noise.roll((1, 2, 3), dims=(2, 3, 4)))
        torch.testing.assert_close(moved, layer(noise).roll((1, 2, 3), dims=(2, 3, 4)), rtol=1e-4, atol=1e-5)
        layer.weights.zero_()
        for channel in range(2):
            layer.weights[:, channel, channel, ..., 0] = 1.0
        torch.testing.assert_close(layer(wave), wave, rtol=1e-4, atol=1e-5)


def test_deeponet_answers_at_any_resolution_with_the_same_functions() -> None:
    workload = loaded("pde-deeponet-tiny")
    net = workload.model.net
    with torch.no_grad():
        coarse, fine = net(torch.ones(1, 3, 8, 9, 9)), net(torch.ones(1, 3, 8, 17, 17))
    assert coarse.shape == (1, 3, 8, 9, 9) and fine.shape == (1, 3, 8, 17, 17)


def test_phases_of_pde_do_the_same_work() -> None:
    traces = [on_cuda("pde-tiny", phase=phase) for phase in pde.PHASES]
    assert len({tuple(op.name for op in trace.ops()) for trace in traces}) == 1


def test_complex_transforms_and_products_are_counted_and_priced_as_measured() -> None:
    trace = on_cuda("pde-tiny")
    prices = priced(trace)
    profile = find_profile(H200.name)
    assert profile is not None
    points = 2 * 16 * 8 * 32 * 32
    forward = [op for op in ops_of(trace, "_fft_r2c") if op.phase == "forward"]
    assert len(forward) == 2
    for op in forward:
        assert op.flops == pytest.approx(2.5 * points * 13)
    products = [op for op in ops_of(trace, "bmm") if op.outputs[0].spec.dtype == "complex64" and op.phase == "forward"]
    assert sum(op.flops or 0 for op in products) == 2 * 4 * (8 * 2 * 16 * 16 * 2 * 4 * 4)
    for op in ops_of(trace, "_fft_r2c", "_fft_c2r", "_fft_c2c"):
        described = describe(shape_of(op), H200)
        assert described is not None and described.kind == "fourier"
        assert all(described.key in part["laws"] for part in profile.ops["stream"]["parts"])
        moved = (op.bytes_read + op.bytes_written) / H200.memory_bandwidth_bytes_per_second
        assert prices[id(op)][1] > moved


# ---------------------------------------------------------------- pic_step


def plasma() -> tuple[pic_step.Plasma, dict[str, Tensor]]:
    workload = loaded("pic_step-tiny")
    return workload.model, dict(workload.batch)


def test_charge_is_conserved_step_by_step_and_gradients_of_its_sum_vanish() -> None:
    model, batch = plasma()
    position, speed, charge = (batch[key] for key in ("position", "speed", "charge"))
    for step in model.steps:
        position, speed = step(model.mesh, position, speed, charge)
        assert position.min() >= 0 and position.max() <= 1
        density = model.mesh.deposit(position, charge)
        torch.testing.assert_close(density.sum(dim=1), charge.sum(dim=1), rtol=1e-5, atol=1e-3)
    (slope,) = torch.autograd.grad(density.sum(), [model.steps[0].field.antenna])
    (other,) = torch.autograd.grad(model(**{k: batch[k] for k in ("position", "speed", "charge")}).square().sum(), [model.steps[0].field.antenna])
    assert slope.abs().max() < 1e-3 * other.abs().max()


def test_a_plane_is_reproduced_by_the_mesh() -> None:
    """Linear elements: gathering a linear function at markers gives the function, wherever they are."""
    mesh = pic_step.Mesh(5, 2)
    torch.manual_seed(0)
    position = torch.rand(1, 100, 3)
    triangle, weights, _ = mesh.locate(position)
    assert weights.min() >= -1e-5
    rows = torch.arange(6).repeat_interleave(6) / 5
    columns = torch.arange(6).repeat(6) / 5
    value = 2 * columns - 3 * rows + 1
    found = (value[mesh.corners[triangle]] * weights).sum(dim=-1)
    torch.testing.assert_close(found, 2 * position[..., 0] - 3 * position[..., 1] + 1)
    slope = (value[mesh.corners[triangle]][..., None] * mesh.slopes[triangle]).sum(dim=-2)
    torch.testing.assert_close(slope, torch.tensor([2.0, -3.0]).expand_as(slope), rtol=1e-4, atol=1e-4)
    assert mesh.degree.sum() == mesh.edges.shape[1] == 2 * (3 * 5 * 5 + 2 * 5)


def test_two_halves_of_the_markers_deposit_what_all_do() -> None:
    model, batch = plasma()
    position, charge = batch["position"], batch["charge"]
    half = position.shape[1] // 2
    parts = [model.mesh.deposit(position[:, at], charge[:, at]) for at in (slice(0, half), slice(half, None))]
    torch.testing.assert_close(parts[0] + parts[1], model.mesh.deposit(position, charge))


@pytest.mark.slow(reason="traces at three sizes; prices of scatters are tested in test_scattered.py")
def test_scatter_costs_what_was_measured_and_memory_grows_with_markers_and_steps() -> None:
    trace = on_cuda("pic_step-tiny")
    prices = priced(trace)
    scatters = [op for op in ops_of(trace, "index_add") if op.phase == "forward" and op.inputs[0].spec.numel == 2 * 4 * 289]
    assert len(scatters) >= 4  # one in each step, one at the end; the mesh's sweeps besides
    large = on_cuda("pic_step-tiny", particles=2_000_000, steps=1)
    for op in ops_of(large, "index_add"):
        described = describe(shape_of(op), H200)
        assert described is not None and described.kind == "scatter" and described.terms["atoms"] > 0
    few, many = (max(price for family, price in found.values()) for found in (prices, priced(large)))
    assert many > 5 * few
    three, one = peak_live(trace, ("steady_step",)), peak_live(on_cuda("pic_step-tiny", steps=1), ("steady_step",))
    per_step = 2 * 4096 * (4 + 4 + 2 * 6) * 4  # at least position, nodes and shares of every marker, and what it saw of them
    assert three - one > 2 * per_step


# ---------------------------------------------------------------- gcn_branch


def test_a_packed_batch_is_its_graphs_one_by_one() -> None:
    workload = loaded("gcn_branch-tiny", micro_batch=5)
    model, batch = workload.model, dict(workload.batch)
    counts = gcn_branch.sizes(model, 5)
    assert len(set(counts)) == 5
    rows = columns = edges = 0
    with torch.no_grad():
        scores = call_model(model, batch)
        shares = gcn_branch.log_shares(scores, batch).exp()
        for number, (own_rows, own_columns, own_edges) in enumerate(counts):
            at = slice(edges, edges + own_edges)
            index = batch["edge_index"][:, at] - torch.tensor([[rows], [columns]])
            variables = slice(columns, columns + own_columns)
            alone = model(batch["constraint"][rows : rows + own_rows], batch["variable"][variables], batch["edge"][at], index)
            torch.testing.assert_close(alone, scores[variables], rtol=1e-4, atol=1e-5)
            candidates = batch["candidate"][variables]
            torch.testing.assert_close(shares[variables][candidates], alone[candidates].softmax(0), rtol=1e-4, atol=1e-6)
            assert not shares[variables][~candidates].any() and batch["graph_of"][variables].eq(number).all()
            rows, columns, edges = rows + own_rows, columns + own_columns, edges + own_edges
    assert edges == batch["edge_index"].shape[1]


def test_the_order_of_constraints_and_edges_does_not_matter() -> None:
    workload = loaded("gcn_branch-tiny", micro_batch=1)
    model, batch = workload.model, dict(workload.batch)
    order = torch.randperm(len(batch["constraint"]))
    edges = torch.randperm(batch["edge_index"].shape[1])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    index = torch.stack([back[batch["edge_index"][0]], batch["edge_index"][1]])[:, edges]
    with torch.no_grad():
        mixed = model(batch["constraint"][order], batch["variable"], batch["edge"][edges], index)
        torch.testing.assert_close(mixed, call_model(model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.slow(reason="a step of the model runs above; bytes of another are held against a real step")
def test_memory_of_ragged_batches_follows_their_sum() -> None:
    """Five graphs of 0.5 to 1.5 times the usual size are as much as five usual ones; two small ones are less than two."""
    small, whole = (peak_here("gcn_branch-tiny", micro_batch=count) for count in (2, 5))
    weights = 2 * 4 * sum(weight.numel() for weight in loaded("gcn_branch-tiny").model.parameters())
    assert (whole - weights) / (small - weights) == pytest.approx(5 / 1.25, rel=0.05)


# ---------------------------------------------------------------- neuroback


def test_each_formula_of_a_batch_stands_alone_and_nodes_have_no_order() -> None:
    workload = loaded("neuroback-tiny")
    model, batch = workload.model, dict(workload.batch)
    nodes = batch["kind"].shape[1]
    with torch.no_grad():
        both = call_model(model, batch)
        second = {name: batch[name][:, (batch[name] >= nodes).all(0)] - nodes for name in neuroback.RELATIONS}
        torch.testing.assert_close(model(batch["kind"][1:], **second), both[1:], rtol=1e-4, atol=1e-5)
        swap = torch.arange(nodes)
        swap[:2] = torch.tensor([1, 0])
        swapped = model(batch["kind"][1:], **{name: swap[edges] for name, edges in second.items()})
        torch.testing.assert_close(swapped[0, :2].flip(0), both[1, :2], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(swapped[0, 2:], both[1, 2:], rtol=1e-4, atol=1e-5)


def test_attention_over_edges_is_a_mean_and_variables_outside_the_backbone_do_not_count() -> None:
    torch.manual_seed(0)
    layer = neuroback.EdgeAttention(8, 2)
    x = torch.randn(1, 8).expand(5, 8)
    source, target = torch.tensor([0, 1, 2, 3]), torch.tensor([4, 4, 4, 0])
    seen = layer(x, source, target)
    torch.testing.assert_close(seen[[4, 0]], layer.key(x[:2]))
    assert not seen[1:4].any()
    workload = loaded("neuroback-tiny")
    batch = dict(workload.batch)
    logits = torch.zeros(batch["targets"].shape, requires_grad=True)
    neuroback.loss(logits, batch).backward()
    assert logits.grad is not None and torch.equal(logits.grad != 0, batch["backbone"])


def test_phases_are_written_as_literals() -> None:
    assert neuroback.phase_lines(torch.tensor([0.3, -2.0, 1.0])) == ["1", "-2", "3"]


@pytest.mark.slow(reason="a step of the model runs above; bytes of another are held against a real step")
def test_memory_and_work_are_linear_in_the_graph() -> None:
    """Four times the graph: whatever looked at all pairs of nodes would be sixteen times as much."""
    small, large = on_cuda("neuroback-tiny"), on_cuda("neuroback-tiny", variables=400, clauses=1600)
    peaks = [peak_live(trace, ("steady_step",)) for trace in (small, large)]
    work = [sum(op.flops or 0 for op in trace.programs["micro_first"].ops) for trace in (small, large)]
    assert 3.7 < peaks[1] / peaks[0] < 4 and 3.7 < work[1] / work[0] < 4


@pytest.mark.slow(reason="a search and two real runs of a large graph")
def test_under_a_memory_cap_a_cpu_recomputes_blocks_and_really_needs_less() -> None:
    size = {"variables": 5000, "clauses": 20000, "local": 0}
    source = Source(model="neuroback-tiny", overrides=size)
    traces = {"keep": trace_as_cpu(source, FP32), "recompute": trace_as_cpu(source, replace(FP32, recompute="full"))}
    capped = parse("CPU")
    capped = replace(capped, device=replace(capped.device, sm_count=1, memory_bytes=680 << 20))
    plan = Plan(model={"model": source.model, "overrides": size}, hardware="CPU", precision="fp32")
    blocks = traces["keep"].meta["blocks"]
    assert isinstance(blocks, list) and len(blocks) == 4
    kept = predict_plan(traces["keep"], plan, capped)
    again = predict_plan(traces, plan.with_(blocks={path: Residency(mode="recompute") for path in blocks}), capped)
    assert kept.worst.verdict == "no" and again.worst.verdict != "no"
    predicted, measured, _ = compared("neuroback-tiny", "full")
    assert predicted == pytest.approx(measured, rel=0.05)
    assert measured < 0.7 * compared("neuroback-tiny")[1]


# ---------------------------------------------------------------- sg_reg


def test_nodes_look_the_same_from_anywhere_on_the_ground() -> None:
    workload = loaded("sg_reg-tiny")
    encoder, batch = workload.model.encoder, dict(workload.batch)
    label, box, points, triplets = (batch[key][0] for key in ("label", "box", "points", "triplets"))
    turned = points @ batch["rotation"][:, None].transpose(-1, -2) + batch["shift"][:, None, None]
    with torch.no_grad():
        before, after = encoder(label, box, points, triplets), encoder(label, box, turned, triplets)
        mirrored = encoder(label, box, points * torch.tensor([-1.0, 1.0, 1.0]), triplets)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert (before[0] - mirrored[0]).abs().max() > 1e-3  # triplets are taken in the order of turning


def test_transport_sums_to_one_and_nodes_that_are_not_there_take_part_in_nothing() -> None:
    workload = loaded("sg_reg-tiny", sweeps=50)
    batch = dict(workload.batch)
    there = batch["there"]
    with torch.no_grad():
        output = call_model(workload.model, batch)
        plan = output["coarse"].exp()
        torch.testing.assert_close(plan[:, :-1].sum(dim=2), torch.ones(2, 16), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(plan[:, :, :-1].sum(dim=1), there[1].float(), rtol=1e-3, atol=1e-3)
        before = compute_loss(workload)
        for key in ("label", "box", "points"):
            batch[key][1][~there[1]] += 3.0
        assert compute_loss(workload) == before
        batch["label"][1][there[1]] += 3.0
        assert compute_loss(workload) != before


def test_pose_is_found_among_outliers() -> None:
    """Three pairs of nodes of five are wrong, and so is a third of the points of the others."""
    torch.manual_seed(0)
    batch = dict(loaded("sg_reg-tiny").batch)
    left = torch.randn(2, 5, 40, 3) * 3
    right = left @ batch["rotation"][:, None].transpose(-1, -2) + batch["shift"][:, None, None]
    right[:, :3] = torch.randn(2, 3, 40, 3) * 3
    weight = torch.ones(2, 5, 40)
    weight[:, 3:, :13] = 0.0
    rotation, shift = sg_reg.agreed(left, right, weight, 0.1)
    torch.testing.assert_close(rotation, batch["rotation"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(shift, batch["shift"], rtol=1e-3, atol=1e-3)
    mirrored, _ = sg_reg.rigid(left, left * torch.tensor([-1.0, 1.0, 1.0]), weight)
    torch.testing.assert_close(torch.linalg.det(mirrored), torch.ones(2, 5))


@pytest.mark.slow(reason="a step of the model runs above; bytes of another are held against a real step")
def test_sweeps_cost_memory_each_and_the_svd_is_counted_and_kept_out_of_backward() -> None:
    fewer, more = (peak_live(on_cuda("sg_reg-tiny", sweeps=sweeps), ("steady_step",)) for sweeps in (10, 15))
    kept = 2 * 4 * (2 * 6 * 41 * 41 + 2 * 17 * 17)  # both sums of a sweep keep what they were of, points' and nodes'
    assert 5 * kept < more - fewer < 1.1 * 5 * kept
    trace = on_cuda("sg_reg-tiny")
    factors = ops_of(trace, "_linalg_svd")
    assert [op.inputs[0].spec.shape for op in factors] == [(2, 6, 3, 3), (2, 3, 3)]
    assert [op.flops for op in factors] == [12 * 22 * 27, 2 * 22 * 27]
    assert {op.phase for op in factors} == {"forward"}
    prices = priced(trace)
    assert all(prices[id(op)][1] > 0 for op in factors)


def test_what_robots_tell_each_other_is_small() -> None:
    full, tiny = sg_reg.build(), loaded("sg_reg-tiny").model
    assert sg_reg.bytes_sent(full) == 4 * (64 * 67 + 16 * 256 * 3) == 66_304
    assert sg_reg.bytes_sent(tiny) == 4 * (16 * 35 + 6 * 40 * 3)
