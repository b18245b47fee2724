"""Points, rays, splats and meshes of the zoo: they compute what their papers say, and foretell knows what they hold."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.hardware import parse
from foretell.plan.types import Plan, Residency
from foretell.price.kernels.memory_bound import kind_of
from foretell.simulate.plan import composed, predict_plan
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import trace_as_cpu
from foretell.trace.record.step import Workload, call_model, compute_loss
from foretell.trace.types import GRADIENT, OPTIMIZER, Trace
from foretell.zoo import get
from foretell.zoo import load as load_module
from foretell.zoo.listing.scenes import ENTRIES
from foretell.zoo.scenes import dnmp, icontrol3d, pronerf, pvd, scenesplat, splatnet
from foretell.zoo.science import polar_mae
from tests.pure.on_cpu import compare_on_cpu

FP32 = Recipe(precision="fp32")


def phases_of(name: str) -> tuple[str, ...]:
    return getattr(load_module(get(name)), "PHASES", ("",))


SMALL = [entry.name for entry in ENTRIES if entry.small]
CASES = [
    pytest.param(name, phase, id=f"{name}-{phase}".rstrip("-"))
    for name in SMALL
    for phase in phases_of(name)
    if (name, phase) != ("pvd_al-tiny", "scratch")  # nothing to choose by without a teacher: the same as pvd-tiny's
]
TRAINED = {
    ("pvd", "features"): ("student.first.",),
    ("pvd", "volume"): ("student.",),
    ("pvd", "render"): ("student.",),
    ("pvd", "scratch"): ("student.",),
    ("pronerf", "exploration"): ("shading.",),
    ("scenesplat", "language"): ("stem.", "down", "up", "pools.", "unpools.", "norm.", "words."),
    ("scenesplat", "masked"): ("stem.", "down", "up", "pools.", "unpools.", "norm.", "restore.", "hidden"),
    ("dnmp", ""): ("codes", "features", "blocks.", "out."),
    ("icontrol3d", ""): ("field.", "sky"),
}
"""Beginnings of the names of what a phase trains; elsewhere everything is trained."""


pytestmark = pytest.mark.usefixtures("one_thread")


def source(name: str, phase: str = "", micro_batch: int = 2, seq: int | None = None, **overrides: Any) -> Source:
    return Source(model=name, overrides=overrides | ({"phase": phase} if phase else {}), micro_batch=micro_batch, seq=seq)


def workload(name: str, phase: str = "", **sizes: Any) -> Workload:
    torch.manual_seed(0)
    return load(source(name, phase, **sizes))


def compared(name: str, phase: str = "", recompute: str = "none", seq: int | None = None, **overrides: int) -> tuple[int, int, Trace]:
    """Predicted and measured bytes on this CPU, and the trace."""
    return _compared(name, phase, recompute, seq, tuple(overrides.items()))


@cache
def _compared(name: str, phase: str, recompute: str, seq: int | None, overrides: tuple[tuple[str, int], ...]) -> tuple[int, int, Trace]:
    given = source(name, phase, seq=seq, **dict(overrides))
    predicted, measured, trace = compare_on_cpu(given, Recipe(precision="fp32", recompute=recompute))
    return predicted, measured, trace


def held(trace: Trace, role: str) -> dict[str, int]:
    """Bytes of that role by the first name of the module that owns them."""
    found: dict[str, int] = {}
    for storage in trace.storages.values():
        if storage.role == role:
            owner = storage.module.partition(".")[0]
            found[owner] = found.get(owner, 0) + storage.nbytes
    return found


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_trains_what_the_phase_trains(name: str, phase: str) -> None:
    given = workload(name, phase)
    loss = compute_loss(given)
    loss.backward()
    assert loss.isfinite()
    begins = TRAINED.get((get(name).module, phase), ("",))
    for path, parameter in given.model.named_parameters():
        trained = path.startswith(begins)
        assert parameter.requires_grad == trained, path
        assert (parameter.grad is not None) == trained, path
        assert not trained or parameter.grad.isfinite().all(), path


PHASE = pytest.mark.slow(reason="a step of it runs above; other models, or the same one in another phase, are compared")
ONE = ("dnmp-tiny",)


@pytest.mark.parametrize(("name", "phase"), [pytest.param(*case.values, id=case.id, marks=() if case.id in ONE else PHASE) for case in CASES])
def test_prediction_equals_a_real_run_and_no_op_is_without_a_rule(name: str, phase: str) -> None:
    predicted, measured, trace = compared(name, phase)
    assert predicted == pytest.approx(measured, rel=0.05)
    assert predicted > 2e6
    assert trace.ops_without_flop_rule == ()
    assert trace.meta["assumed"] == []


HALF = pytest.mark.slow(reason="products in bf16 take seconds on most CPUs; every model runs a step in fp32, and others in it or under autocast")


@pytest.mark.parametrize(
    ("name", "phase", "whole_model"),
    [
        pytest.param(*case.values, whole, id=f"{case.id}-{'whole' if whole else 'autocast'}", marks=() if number % 8 == 4 * whole else HALF)
        for number, case in enumerate(CASES)
        for whole in (False, True)
    ],
)
def test_runs_in_bfloat16(name: str, phase: str, whole_model: bool) -> None:
    given = workload(name, phase)
    if whole_model:
        batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in given.batch.items()}
        given = Workload(given.model.to(torch.bfloat16), batch, given.loss)
    with torch.autocast("cpu", torch.bfloat16, enabled=not whole_model):
        loss = compute_loss(given)
    loss.backward()
    assert loss.isfinite()


SIZED = pytest.mark.slow(reason="its small preset has the same ops; another model has its paper's size here")


@pytest.mark.slow(reason="the small presets have the same ops and run a step above")
@pytest.mark.parametrize("name", [pytest.param("pvd_al", marks=SIZED), pytest.param("splatnet", marks=SIZED), "icontrol3d"])
def test_paper_size_traces_as_on_a_gpu(name: str) -> None:
    trace = capture(lambda: load(Source(model=name)), Recipe(), capability=(9, 0))
    assert trace.ops_without_flop_rule == ()
    assert trace.meta["assumed"] == []


def test_phases_are_refused_by_name() -> None:
    for module in (pvd, pronerf, scenesplat):
        with pytest.raises(ValueError, match=f"{module.PHASES[0]}.*'never'"):
            module.build(phase="never")


# ---------------------------------------------------------------- PoLAr-MAE


def test_farthest_points_are_those_of_the_definition_and_never_padding() -> None:
    torch.manual_seed(0)
    xyz, valid = torch.randn(2, 40, 3), torch.arange(40) < torch.tensor([[40], [25]])
    found = polar_mae.farthest_points(xyz, valid, 12)
    for event in range(2):
        chosen = [0]
        for _ in range(11):
            apart = torch.cdist(xyz[event], xyz[event, chosen]).amin(dim=1)
            chosen.append(int(apart[valid[event]].argmax()))
        assert found[event].tolist() == chosen
    near = polar_mae.nearest_points(xyz[:, :5], xyz, valid, 4)
    assert near.sort(-1).values.equal(torch.cdist(xyz[:, :5], xyz).masked_fill(~valid[:, None], 9e9).topk(4, largest=False).indices.sort(-1).values)


def test_padding_of_a_cloud_and_order_within_a_token_have_no_influence() -> None:
    given = workload("polar_mae-tiny")
    loss = compute_loss(given)
    changed = dict(given.batch)
    padding = torch.arange(changed["points"].shape[1]) >= changed["lengths"][:, None]
    assert padding.sum() == 512
    changed["points"] = torch.where(padding[..., None], 1e3, changed["points"])
    torch.testing.assert_close(compute_loss(Workload(given.model, changed, given.loss)), loss)
    points, order = torch.randn(1, 3, 16, 4), torch.randperm(16)
    torch.testing.assert_close(given.model.tokens(points), given.model.tokens(points[:, :, order]))


def test_visible_and_masked_groups_share_out_the_groups_of_each_event() -> None:
    model = workload("polar_mae-tiny").model
    there = torch.arange(24) < torch.tensor([[24], [13]])
    visible, seen, hidden, unseen = model.split(there, torch.rand(2, 24))
    for event, count in ((0, 24), (1, 13)):
        both = torch.cat([visible[event][seen[event]], hidden[event][unseen[event]]])
        assert sorted(both.tolist()) == list(range(count))
        assert seen[event].sum() == int(0.4 * count)


def test_chamfer_distance_by_hand() -> None:
    a, b = torch.tensor([[0.0, 0, 0], [1, 0, 0]]), torch.tensor([[0.0, 0, 0], [0, 2, 0]])
    assert polar_mae.chamfer(a, b).item() == pytest.approx((0 + 1) / 2 + (0 + 4) / 2)


@pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
def test_memory_of_an_event_of_thirty_thousand_points() -> None:
    predicted, measured, _ = compared("polar_mae-tiny", seq=30_000)
    assert predicted == pytest.approx(measured, rel=0.05)
    assert predicted > 2 * compared("polar_mae-tiny")[0], "distances of centres to points are what grows"


# ---------------------------------------------------------------- PVD and PVD-AL

FEW = {"poses": 2, "rays": 2, "samples": 8}


PAIRS = pytest.mark.slow(reason="other kinds of field, which are converted as the first two are")


@pytest.mark.slow(reason="every phase of two kinds of field; a step of each phase runs above")
@pytest.mark.parametrize(
    ("teacher", "student"),
    [
        pytest.param(*pair, marks=() if pair == (pvd.KINDS[0], pvd.KINDS[1]) else PAIRS)
        for pair in permutations(pvd.KINDS, 2)
    ],
)
def test_every_conversion_runs_and_the_teacher_costs_no_states(teacher: str, student: str) -> None:
    for phase in pvd.PHASES[:3]:
        given = workload("pvd-tiny", phase, teacher=teacher, student=student, **FEW)
        compute_loss(given).backward()
        assert all(parameter.grad is None for parameter in given.model.teacher.parameters())
        assert any(parameter.grad is not None for parameter in given.model.student.parameters())
    trace = trace_as_cpu(source("pvd-tiny", "volume", teacher=teacher, student=student, **FEW), FP32)
    assert trace.ops_without_flop_rule == ()
    for role in (GRADIENT, OPTIMIZER):
        assert set(held(trace, role)) <= {"student", ""}
    own = 4 * sum(parameter.numel() for parameter in given.model.student.parameters())
    assert 2 * own <= sum(held(trace, OPTIMIZER).values()) <= 2 * own + 4096


@pytest.mark.parametrize("phase", [pytest.param(phase, marks=PHASE) for phase in pvd.PHASES[:3]])
def test_one_plan_serves_every_stage(phase: str) -> None:
    """Blocks keep their names from stage to stage, so a plan that computes half of them again is valid for each."""
    cluster = parse("H100")
    modes = {"student.first.blocks.0-1": Residency(mode="recompute"), "student.first.blocks.2-3": Residency(mode="keep")}
    plan = Plan(model={"model": "pvd-tiny"}, hardware="H100", precision="fp32", micro_batch=2, blocks=modes)
    given = source("pvd-tiny", phase, width=256, samples=64)
    traces = {
        mode: capture(lambda: load(given), Recipe(precision="fp32", recompute=how), capability=(9, 0))
        for mode, how in (("keep", "none"), ("recompute", "full"))
    }
    cost, whole = predict_plan(traces, plan, cluster), predict_plan(traces["keep"], replace(plan, blocks={}), cluster)
    assert cost.ranks[0].verdict == "fits"
    assert cost.ranks[0].memory.allocated_bytes <= whole.ranks[0].memory.allocated_bytes
    assert sum(op.phase == "recompute" for op in composed(traces, plan).programs["micro_first"].ops) > 0
    predicted, measured, _ = compared("pvd-tiny", phase, recompute="full")
    assert predicted == pytest.approx(measured, rel=0.05)


def test_hash_features_are_interpolated_between_corners_and_meet_at_cell_borders() -> None:
    torch.manual_seed(0)
    field = pvd.HashField(4, levels=2, entries=4096, finest=32)
    on_border = torch.tensor([[0.25, 0.1, -0.3]])
    apart = field(on_border + torch.tensor([1e-6, 0, 0])) - field(on_border - torch.tensor([1e-6, 0, 0]))
    assert apart.abs().max() < 1e-4
    spacing = 2 / 32 / 4
    line = field.out[0].weight.new_tensor([[0.01 + spacing * i, 0.2, 0.2] for i in range(3)])
    with torch.no_grad():
        field.out = nn.Sequential(nn.Identity())  # the features themselves, linear within a cell
        a, b, c = field(line)
    torch.testing.assert_close(b, (a + c) / 2, atol=1e-5, rtol=1e-4)


def test_rendering_an_even_fog_is_known_in_closed_form() -> None:
    density, colour = torch.full((1, 50), math.log(0.7)), torch.full((1, 50, 3), 0.5)
    assert pvd.render(density, colour, 0.04)[0, 0].item() == pytest.approx(0.5 * (1 - math.exp(-0.7 * 2)), rel=1e-5)


def test_active_sampling_takes_the_worst_poses_rays_and_points() -> None:
    given = workload("pvd_al-tiny", "volume")
    model, batch = given.model, given.batch
    model.gap.copy_(torch.tensor([0.0, 3.0, 1.0, 2.0]))
    origins, directions = model.hardest_rays(batch["origins"], batch["directions"])
    candidates = batch["origins"][[1, 3]].flatten(0, 1)
    assert (origins.unsqueeze(1) == candidates).all(-1).any(1).all(), "rays are those of the two worst poses"
    with torch.no_grad():
        def apart(o: Tensor, d: Tensor) -> Tensor:
            return (model.colours(model.student, o, d) - model.colours(model.teacher, o, d)).abs().sum(-1)

        chosen, every = apart(origins, directions), apart(candidates, batch["directions"][[1, 3]].flatten(0, 1))
    torch.testing.assert_close(chosen.sort().values, every.topk(len(chosen)).values.sort().values)
    assert not model.gap[[1, 3]].equal(torch.tensor([3.0, 2.0])) and model.gap[0] == 0
    all_points = len(origins) * model.counts["samples"]
    assert call_model(model, batch)["gap"].numel() == all_points // 2


# ---------------------------------------------------------------- ProNeRF


def test_a_point_on_the_ray_of_a_pixel_is_projected_onto_it() -> None:
    torch.manual_seed(0)
    turn = torch.linalg.qr(torch.randn(2, 3, 3)).Q
    places, at = torch.randn(2, 3), torch.rand(4, 5, 2) - 0.5
    toward = torch.cat([at, torch.ones(4, 5, 1)], dim=-1) * (1 + torch.rand(4, 5, 1))
    for view in range(2):
        x = places[view] + torch.einsum("ji,rsj->rsi", turn[view], toward)
        torch.testing.assert_close(pronerf.project(x, turn, places)[view], at, atol=1e-5, rtol=1e-4)


def test_depths_come_in_order_and_exploring_adds_one_in_each_part_of_the_ray() -> None:
    given = workload("pronerf-tiny", "exploration")
    batch = given.batch
    depths, _, blended = given.model.sampler(*(batch[key] for key in ("origins", "directions", "rotations", "places", "pictures")))
    assert (depths.diff(dim=1) >= 0).all() and depths.min() >= pronerf.NEAR and depths.max() <= pronerf.FAR
    assert blended.min() >= 0 and blended.max() <= 1
    explored = given.model.explore(depths, batch["noise"])
    assert (explored.diff(dim=1) >= 0).all()
    parts = ((explored - pronerf.NEAR) / (pronerf.FAR - pronerf.NEAR) * 16 * (1 - 1e-6)).long()
    assert all(len(set(row.tolist())) == 16 for row in parts)


@pytest.mark.slow(reason="four real steps; one of them is compared above, and both phases run a step")
def test_phases_of_sampling_have_unlike_graphs_and_each_its_own_bytes_per_ray() -> None:
    per_ray = {}
    for phase in pronerf.PHASES:
        few, few_measured, trace = compared("pronerf-tiny", phase)
        many, many_measured, _ = compared("pronerf-tiny", phase, rays=384)
        assert many - few == pytest.approx(many_measured - few_measured, rel=0.05)
        per_ray[phase] = (many - few) / 2 / 256
        assert ("sampler" in held(trace, GRADIENT)) == (phase == "exploitation")
    assert per_ray["exploration"] > 2 * per_ray["exploitation"], "a plan for the phase with many samples covers the other"


# ---------------------------------------------------------------- Splat the Net


def test_the_integral_in_closed_form_equals_a_fine_quadrature() -> None:
    torch.manual_seed(0)
    frequency, phase, weight = (torch.randn(6, 8, dtype=torch.float64) * scale for scale in (4, 2, 1))
    frequency[0] = 0
    bias, enter = torch.randn(2, 6, dtype=torch.float64)
    leave = enter + torch.rand(6, dtype=torch.float64) * 3
    exact = splatnet.integral(frequency, phase, weight, bias, enter, leave)
    t = enter[:, None] + (leave - enter)[:, None] * (torch.arange(10_000) + 0.5) / 10_000
    values = (weight[:, None] * torch.cos(frequency[:, None] * t[..., None] + phase[:, None])).sum(-1) + bias[:, None]
    torch.testing.assert_close(exact, values.mean(dim=1) * (leave - enter), atol=1e-4, rtol=1e-4)


def test_rays_through_a_primitive_integrate_its_network_inside_its_ellipsoid() -> None:
    torch.manual_seed(0)
    primitives = splatnet.Primitives(1, 4).double()
    position = primitives.centre.detach()[0] + torch.tensor([0.05, -0.03, -4.0], dtype=torch.float64)
    ray = torch.tensor([[[0.0, 0.0, 1.0]]], dtype=torch.float64)
    with torch.no_grad():
        depth, _ = primitives.along(torch.zeros(1, 1, dtype=torch.long), position, ray)
        t = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000 * 8
        local = (position + t[:, None] * ray[0, 0] - primitives.centre[0]) @ splatnet.rotation(primitives.turn[0]) / primitives.log_scale[0].exp()
        value = (primitives.weight[0] * torch.cos(local @ primitives.wave[0].t() + primitives.phase[0])).sum(-1) + primitives.bias[0]
        inside = (local.square().sum(-1) < 1).double()
    assert inside.sum() > 100
    assert depth.item() == pytest.approx(max(0.0, (value * inside).sum().item() * 8 / 20_000), abs=1e-3)


def test_a_picture_does_not_depend_on_the_order_of_primitives_but_on_their_depth() -> None:
    given = workload("splatnet-tiny", capacity=128)
    model, batch = given.model, given.batch
    with torch.no_grad():
        picture = call_model(model, batch)
        order = torch.randperm(128)
        for parameter in model.primitives.parameters():
            parameter.copy_(parameter[order].clone())
        torch.testing.assert_close(call_model(model, batch), picture, atol=1e-5, rtol=1e-4)
        model.primitives.centre[:, 2].neg_()
        assert (call_model(model, batch) - picture).abs().max() > 0.01


@pytest.mark.slow(reason="a long trace and a real step; prices of scatters are tested in test_scattered.py")
def test_sorts_and_scatters_have_prices_of_their_own() -> None:
    trace = compared("splatnet-tiny")[2]
    ops = {op.name.split(".")[1]: op for op in trace.ops()}
    assert {ops[name].flops for name in ("sort", "topk")} == {0}
    assert {kind_of(name) for name in ("sort", "topk")} == {"order"}
    scattered = [name for name in ops if name in ("index_put", "index_put_", "_index_put_impl_", "index_add", "scatter_add")]
    assert scattered and {kind_of(name) for name in scattered} <= {"sorted", "scatter"}


# ---------------------------------------------------------------- SceneSplat


def test_the_curve_interleaves_bits_scene_by_scene() -> None:
    grid = torch.randint(0, 1024, (50, 3))
    scene = torch.randint(0, 3, (50,))
    for (x, y, z), which, code in zip(grid.tolist(), scene.tolist(), scenesplat.curve(grid, scene).tolist(), strict=True):
        bits = "".join(f"{x:010b}"[i] + f"{y:010b}"[i] + f"{z:010b}"[i] for i in range(10))
        assert code == which << 30 | int(bits, 2)
    assert scenesplat.curve(grid, torch.full((50,), scenesplat.EMPTY)).min() > scenesplat.curve(grid, scene).max()


@pytest.mark.parametrize("phase", scenesplat.PHASES)
def test_scenes_of_a_batch_do_not_see_each_other_and_order_does_not_matter(phase: str) -> None:
    given = workload("scenesplat-tiny", phase)
    with torch.no_grad():
        for parameter in given.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    output = call_model(given.model, given.batch)
    changed = dict(given.batch)
    changed["gaussians"] = changed["gaussians"].clone()
    changed["gaussians"][500:] = torch.randn(500, scenesplat.GAUSSIAN)
    other = call_model(given.model, changed)
    torch.testing.assert_close(other[:500], output[:500])
    assert (other[500:] - output[500:]).abs().max() > 0.01
    alone = call_model(given.model, {key: value[:500] for key, value in given.batch.items()})
    torch.testing.assert_close(alone, output[:500], atol=1e-4, rtol=1e-4)


def test_pooling_leaves_one_slot_for_each_cell_with_its_largest_features() -> None:
    torch.manual_seed(0)
    grid, scene = torch.randint(0, 8, (60, 3)), torch.zeros(60, dtype=torch.long)
    pool = scenesplat.Pool(4, 4, keep=1.0)
    pool.linear = pool.norm = nn.Identity()
    x = torch.randn(60, 4)
    pooled, at, slot = pool(x, scenesplat.level(grid, scene, 16), 16)
    cells = {tuple(cell) for cell in (grid >> 1).tolist()}
    assert (at.scene != scenesplat.EMPTY).sum() == len(cells)
    for cell in cells:
        members = ((grid >> 1) == torch.tensor(cell)).all(1)
        assert slot[members].unique().numel() == 1
        torch.testing.assert_close(pooled[slot[members][0]], nn.functional.gelu(x[members].amax(0)))


@pytest.mark.slow(reason="a scene ten times as large, really run")
def test_memory_over_ten_times_the_scene() -> None:
    small, _, trace = compared("scenesplat-tiny", "language")
    large, measured, _ = compared("scenesplat-tiny", "language", seq=5000)
    assert large == pytest.approx(measured, rel=0.05)
    assert 8 < large / small < 10
    assert sum(op.name.startswith("aten.sort") for op in trace.programs["micro_first"].ops) == 4, "two curves at two levels"


# ---------------------------------------------------------------- DNMP


def test_template_meshes_are_closed() -> None:
    for level, vertices, faces in ((0, 6, 8), (1, 18, 32), (2, 66, 128)):
        points, triangles = dnmp.template(level)
        assert (len(points), len(triangles)) == (vertices, faces)
        edges = [(a, b) for face in triangles for a, b in ((face[0], face[1]), (face[1], face[2]), (face[2], face[0]))]
        assert len(set(edges)) == len(edges) and {(b, a) for a, b in edges} == set(edges)


def test_rays_meet_triangles_where_their_corners_say() -> None:
    torch.manual_seed(0)
    corners, origins = torch.randn(20, 3, 3, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    directions = nn.functional.normalize(torch.randn(20, 3, dtype=torch.float64), dim=-1)
    depth, weights = dnmp.meet(origins, directions, corners)
    torch.testing.assert_close(weights.sum(-1), torch.ones(20, dtype=torch.float64))
    torch.testing.assert_close((weights.unsqueeze(-1) * corners).sum(1), origins + depth.unsqueeze(-1) * directions)


def test_raster_indices_are_integers_without_gradient_and_what_they_pick_has_one() -> None:
    given = workload("dnmp-tiny")
    model, batch = given.model, given.batch
    numbers, there = model.rasterise(model.vertices(), batch["origins"], batch["directions"])
    assert numbers.dtype == torch.int64 and not numbers.requires_grad and there.sum() > 20
    depth, weights = dnmp.meet(batch["origins"].unsqueeze(1), batch["directions"].unsqueeze(1), model.vertices()[numbers])
    assert weights[there].min() >= -1e-4
    met = torch.where(there, depth, torch.inf)
    assert (met[:, 1:] >= met[:, :-1] - 1e-4).all(), "nearest first"
    compute_loss(given).backward()
    assert model.codes.grad.abs().sum() > 0 and model.features.grad.abs().sum() > 0
    trace = compared("dnmp-tiny")[2]
    candidates = 128 * 4 * 32 * 3 * 3 * 4
    assert max(storage.nbytes for storage in trace.storages.values()) >= candidates
    assert max(storage.nbytes for storage in trace.storages.values() if storage.saved) < candidates, "candidate faces are not kept"


@pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
def test_bytes_of_a_thousand_pixels() -> None:
    few, few_measured, _ = compared("dnmp-tiny")
    many, many_measured, _ = compared("dnmp-tiny", rays=564)
    assert many - few == pytest.approx(many_measured - few_measured, rel=0.05)


# ---------------------------------------------------------------- iControl3D


def test_depth_is_aligned_by_scale_and_shift_most_of_all_beside_the_hole() -> None:
    torch.manual_seed(0)
    estimate = 1 + torch.rand(1, 1, 16, 16)
    seen = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    seen[..., 8:] = False
    known = (2 * estimate + 0.5) * seen
    torch.testing.assert_close(icontrol3d.align(estimate, known, seen), 2 * estimate + 0.5)
    far = seen.clone()
    far[..., 4:] = False
    wrong = known + 0.5 * far
    off = (icontrol3d.align(estimate, wrong, seen) - (2 * estimate + 0.5))[~seen].mean()
    assert off < 0.5 * (0.5 * far.sum() / seen.sum()), "far from the hole counts less"


def test_the_scene_grows_by_a_picture_and_what_was_seen_is_drawn_again() -> None:
    given = workload("icontrol3d-tiny")
    model, side = given.model, 32
    model.vertices[:, 2] = 50.0  # far away: nothing is in front of what is added
    camera = torch.zeros(3)
    model.grow(camera)
    sizes = {name: len(getattr(model, name)) for name in ("vertices", "colours", "faces", "pictures", "cameras")}
    assert sizes == {"vertices": 3 * side**2, "colours": 3 * side**2, "faces": 3 * 2 * (side - 1) ** 2, "pictures": 3, "cameras": 3}
    assert model.faces.max() < len(model.vertices)
    picture, depth, seen = model.draw(camera)
    assert seen.float().mean() > 0.95
    assert (depth[seen] < icontrol3d.FAR).float().mean() > 0.95
    assert (picture - model.pictures[-1:])[seen.expand_as(picture)].abs().median() < 0.1


@pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
def test_memory_of_every_added_view() -> None:
    found = [compared("icontrol3d-tiny"), *(compared("icontrol3d-tiny", views=views) for views in (4, 7))]
    for predicted, measured, _ in found:
        assert predicted == pytest.approx(measured, rel=0.05)
    each = [(found[1][i] - found[0][i], (found[2][i] - found[1][i]) / 3) for i in (0, 1)]
    assert each[0][0] == pytest.approx(each[1][0], rel=0.02)
    assert each[0][0] == pytest.approx(each[0][1], rel=0.02), "as much for each view"
