"""Images in the zoo: what each paper is about holds, memory as measured on this CPU, no op uncovered, and each row's trap."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell import api, zoo
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.plan import legal
from foretell.plan.context import share
from foretell.plan.facts import facts_of
from foretell.plan.recipe import recipe_of
from foretell.plan.tensor.derive import derive, refusal
from foretell.plan.types import Plan
from foretell.simulate.memory.remedies import Outlook
from foretell.simulate.memory.replay import peak_live
from foretell.simulate.plan import KEEP, Options, predict_plan
from foretell.trace.flow.record import record
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu
from foretell.trace.record.step import Workload, call_model, compute_loss
from foretell.trace.types import ACTIVATION, GRADIENT, OPTIMIZER, PARAMETER, Op, Trace
from foretell.zoo.listing import vision
from foretell.zoo.perception import kmax, wildlife
from foretell.zoo.vision import context_split, geo, pansharpen, pyra, strip_mlp
from tests.pure.on_cpu import compare_on_cpu

FP32 = Recipe(precision="fp32")
ALONE, CAM = (("exclusive", 1.0),), (("method", "cam"),)
CLASSIFIER = (("phase", "classifier"),)
CASES: list[tuple[str, tuple[tuple[str, Any], ...]]] = [
    ("kmax-tiny", ()),
    ("strip-mlp-tiny", ()),
    ("pyra-tiny", ()),
    ("context-split-tiny", ()),
    ("context-split-tiny", ALONE),
    ("context-split-tiny", CAM),
    ("pansharpen-tiny", ()),
    ("pansharpen-tiny", (("method", "cnn"),)),
    ("pansharpen-tiny", (("method", "unfold"),)),
    ("wildlife-tiny", ()),
    ("wildlife-tiny", CLASSIFIER),
    ("geo-tiny", ()),
]
TRACED = [
    ("geo-tiny", ()), ("kmax-tiny", ()), ("pyra-tiny", ()), ("wildlife-tiny", ()), ("context-split-tiny", ()),
    ("pansharpen-tiny", ()), ("strip-mlp-tiny", ()), ("context-split-tiny", ALONE), ("context-split-tiny", CAM),
    ("pansharpen-tiny", (("method", "cnn"),)),
    ("pansharpen-tiny", (("method", "unfold"),)), ("wildlife-tiny", CLASSIFIER),
]  # fmt: skip
"""Held against a real step by the slow tests alone."""
MEASURED = pytest.mark.slow(reason="a step of it runs above; bytes of other parts of the zoo are measured in their files")
OTHER_WAY = pytest.mark.slow(reason="another way of a model that is traced in one, or a long trace of one that runs a step above")
WITHOUT_GRADIENT = {("context-split-tiny", ALONE): ["head_context.weight"]}
IDS = ["-".join([name, *(str(value) for _, value in more)]) for name, more in CASES]


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def source(name: str, micro_batch: int = 2, **more: Any) -> Source:
    return Source(model=name, micro_batch=micro_batch, overrides=more)


def made(name: str, micro_batch: int = 2, **more: Any) -> Workload:
    torch.manual_seed(0)
    return load(source(name, micro_batch, **more))


@functools.cache
def on_cpu(name: str, more: tuple[tuple[str, Any], ...]) -> tuple[int, int, Trace]:
    predicted, measured, trace = compare_on_cpu(source(name, **dict(more)), FP32)
    return predicted, measured, trace


@functools.cache
def _traced(name: str, more: tuple[tuple[str, Any], ...]) -> Trace:
    return trace_as_cpu(source(name, **dict(more)), FP32)


def seen(name: str, more: tuple[tuple[str, Any], ...]) -> Trace:
    """The trace that is held against a real step, where `make test` runs one."""
    return _traced(name, more) if (name, more) in TRACED else on_cpu(name, more)[2]


@functools.cache
def on_cuda(name: str, more: tuple[tuple[str, Any], ...], micro_batch: int = 2, recipe: Recipe = FP32) -> Trace:
    return capture(lambda: load(source(name, micro_batch, **dict(more))), recipe)


def ops(trace: Trace, under: str = "", phase: str = "") -> list[Op]:
    found = trace.programs["micro_first"].ops
    return [op for op in found if op.module.startswith(under) and (not phase or op.phase == phase)]


def flops(trace: Trace, under: str = "", phase: str = "") -> int:
    return sum(op.flops or 0 for op in ops(trace, under, phase))


def held(trace: Trace, role: str, under: str = "") -> int:
    """Bytes of one role that belong to modules under a path."""
    return sum(one.nbytes for one in trace.storages.values() if one.role == role and one.module.startswith(under))


def saved(trace: Trace, under: str = "") -> int:
    """Bytes of activations that autograd keeps from forward to backward."""
    return sum(
        one.nbytes for one in trace.storages.values() if one.saved and one.role == ACTIVATION and one.module.startswith(under)
    )


class TestAll:
    def test_the_list_is_filled_in_and_every_case_is_here(self) -> None:
        small = {entry.name for entry in vision.ENTRIES if entry.small}
        assert small == {name for name, _ in CASES} and all(f"{e.name}-tiny" in small for e in vision.ENTRIES if not e.small)
        assert all(entry.paper and entry.task and entry.motif and entry.trap for entry in vision.ENTRIES)

    @pytest.mark.parametrize("case", CASES, ids=IDS)
    def test_it_trains(self, case: tuple[str, Any]) -> None:
        work = made(case[0], **dict(case[1]))
        loss = compute_loss(work)
        assert loss.shape == () and torch.isfinite(loss)
        loss.backward()
        trained = [(name, one) for name, one in work.model.named_parameters() if one.requires_grad]
        assert trained and [name for name, one in trained if one.grad is None] == WITHOUT_GRADIENT.get(case, [])
        assert all(one.grad is None for one in work.model.parameters() if not one.requires_grad)

    @pytest.mark.parametrize(
        "case", [pytest.param(case, id=name, marks=MEASURED if case in TRACED else ()) for case, name in zip(CASES, IDS, strict=True)]
    )
    def test_memory_is_what_this_cpu_measures(self, case: tuple[str, Any]) -> None:
        predicted, measured, _ = on_cpu(*case)
        assert predicted == pytest.approx(measured, rel=0.05)
        assert measured > 2_000_000

    @pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=name, marks=OTHER_WAY if case[1] or case[0] != "geo-tiny" else ())
            for case, name in zip(CASES, IDS, strict=True)
        ],
    )
    def test_no_op_is_without_a_rule(self, case: tuple[str, Any]) -> None:
        here = seen(*case)
        for trace in (here, *([] if case[1] else [on_cuda(*case)])):
            assert trace.ops_without_flop_rule == () and not trace.meta.get("assumed")

    @pytest.mark.parametrize("name", [entry.name for entry in vision.ENTRIES if not entry.small])
    def test_the_published_size_is_built(self, name: str) -> None:
        entry = zoo.get(name)
        with torch.device("meta"):
            model = zoo.load(entry).build(**entry.config)
            found = zoo.load(entry).batch(model, 1, entry.seq, entry.image)
        assert all(len(tensor) == 1 for tensor in found.values())


class TestKMaX:
    def test_a_pixel_belongs_to_one_cluster_and_clusters_take_up_its_value(self) -> None:
        scores = torch.randn(2, 5, 30, requires_grad=True)
        chosen = kmax.assign(scores)
        assert not chosen.requires_grad and torch.equal(chosen.sum(dim=1), torch.ones(2, 30))
        values = torch.randn(2, 30, 4)
        moved = torch.zeros(2, 5, 4)
        for b in range(2):
            for pixel in range(30):
                moved[b, int(scores[b, :, pixel].argmax())] += values[b, pixel]
        torch.testing.assert_close(chosen @ values, moved)

    def test_matching_is_one_to_one_and_takes_the_best_pair_first(self) -> None:
        likeness = torch.rand(3, 7, 4)
        best = likeness.flatten(1).argmax(dim=1)
        match = kmax._matched(likeness.clone())
        assert all(len(set(row)) == 4 for row in match.tolist())
        assert torch.equal(match[torch.arange(3), best % 4], best // 4)

    @pytest.mark.slow(reason="a long trace of a model that runs a step above")
    def test_no_gradient_runs_through_the_assignment(self) -> None:
        trace = seen("kmax-tiny", ())
        argmax = [op for op in ops(trace, "blocks") if op.name == "aten.argmax.default"]
        assert [op.phase for op in argmax] == ["forward"] * 6
        kept = {op.outputs[0].storage for op in ops(trace, "blocks", "forward") if op.name.startswith("aten.scatter")}
        assert len(kept) == 6 and all(trace.storages[number].saved for number in kept)  # for the values' gradient
        assert not any("scatter" in op.name for op in ops(trace, "blocks", "backward"))

    @pytest.mark.slow(reason="a large image traced op by op")
    def test_longer_pixel_sequences_make_recompute_worth_its_time(self) -> None:
        saves = []
        for trace in (on_cuda("kmax-tiny", ()), on_cuda("kmax-tiny", (("image", 512),))):
            answer = api.predict(trace, FP32, parse("H100,memory=700MiB"), {"micro_batch": 2})
            guess = Outlook.from_json(answer.model["outlook"])
            saves.append(guess.after({}) - guess.after({"recompute": "full"}) > 0.01 * answer.memory.device_bytes)
        assert saves == [False, True]


class TestStripMLP:
    def test_a_strip_needs_its_row_and_the_rows_beside_it(self) -> None:
        layer = strip_mlp.StripLayer(side=6, patches=2, reach=1)
        x = torch.randn(1, 4, 8, 6)
        other = x.clone()
        other[:, :, 3, 2] += 1.0
        changed = (layer(x) != layer(other)).any(dim=1)[0]
        assert changed.any(dim=1).tolist() == [row in (2, 3, 4) for row in range(8)]
        assert changed[2:5].all()  # every token of them

    def test_an_image_cut_in_two_needs_the_edges_of_the_other_half(self) -> None:
        layer = strip_mlp.StripLayer(side=6, patches=2, reach=2)
        x = torch.randn(2, 4, 8, 6)
        whole = layer(x)
        torch.testing.assert_close(layer(x[:, :, : 4 + 2])[:, :, :4], whole[:, :, :4])
        torch.testing.assert_close(layer(x[:, :, 4 - 2 :])[:, :, 2:], whole[:, :, 4:])
        assert not torch.allclose(layer(x[:, :, :4]), whole[:, :, :4])

    def test_sharing_its_positions_is_refused_with_the_reason(self) -> None:
        with pytest.raises(UserError, match="positions of a sample, and no tensor of the batch is"):
            share(record(made("strip-mlp-tiny")), 2)


class TestPYRA:
    def test_the_most_alike_pairs_merge_and_the_class_token_stays_first(self) -> None:
        keys = torch.randn(1, 9, 4)
        keys[:, 7] = 3.0 * keys[:, 4]  # of all even tokens, 4 is most like an odd one
        keys[:, 1] = keys[:, 0]  # but for the class token, which does not merge
        source, rest, target = pyra.pairs(keys, 2)
        assert source[0, 0].item() == 4 // 2 and target[0, 0].item() == 7 // 2
        assert rest[0, 0].item() == 0 and sorted([*source.flatten().tolist(), *rest.flatten().tolist()]) == [0, 1, 2, 3, 4]

    def test_merging_keeps_the_weighted_sum_of_the_tokens(self) -> None:
        block = pyra.Block(8, 2, 2, merge=5)
        x, sizes = torch.randn(2, 21, 8), torch.rand(2, 21, 1) + 1.0
        fewer, weights = block._merged(x, sizes, *pyra.pairs(torch.randn(2, 21, 4), 5))
        assert fewer.shape == (2, 16, 8) and weights.shape == (2, 16, 1)
        torch.testing.assert_close((fewer * weights).sum(dim=1), (x * sizes).sum(dim=1))  # re-activation starts at one
        torch.testing.assert_close(weights.sum(dim=1), sizes.sum(dim=1))

    @pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
    def test_fewer_tokens_from_block_to_block_show_in_flops_and_memory(self) -> None:
        _, _, trace = on_cpu("pyra-tiny", ())
        tokens = [145 - 24 * index for index in range(5)]
        mlp = [flops(trace, f"blocks.{index}.mlp.up", "forward") for index in range(4)]
        assert mlp == [2 * 2 * count * 64 * 256 for count in tokens[1:]]  # merging comes before the MLP
        projections = [sum(flops(trace, f"blocks.{i}.attn.{part}", "forward") for part in ("qkv", "proj")) for i in range(4)]
        assert projections == [2 * 2 * count * 64 * 4 * 64 for count in tokens[:4]]
        kept = [saved(trace, f"blocks.{index}") for index in range(4)]
        assert all(later < 0.9 * earlier for earlier, later in pairwise(kept))

    @pytest.mark.slow(reason="what is frozen has no gradient in the step that runs above, and no state in test_capture.py")
    def test_frozen_weights_cost_no_gradient_and_no_state(self) -> None:
        _, _, trace = on_cpu("pyra-tiny", ())
        work = made("pyra-tiny")
        trained = sum(4 * one.numel() for one in work.model.parameters() if one.requires_grad)
        assert held(trace, GRADIENT) == trained < held(trace, PARAMETER) / 10
        count = sum(one.requires_grad for one in work.model.parameters())
        assert held(trace, OPTIMIZER) == 2 * trained + 4 * count  # two moments and a counter each
        assert held(trace, GRADIENT, "blocks.0.mlp") == held(trace, OPTIMIZER, "blocks.0.mlp") == 0


class TestContextSplit:
    def test_exclusive_images_teach_only_the_object_half(self) -> None:
        work = made("context-split-tiny", micro_batch=4)
        features: list[Tensor] = []
        work.model.trunk.register_forward_hook(lambda _, __, out: features.append(out) or out.retain_grad())
        compute_loss(work).backward()
        grad = features[0].grad
        assert grad is not None
        thing, context = (half.flatten(1).abs().sum(dim=1) for half in grad.chunk(2, dim=1))
        assert (thing > 0).all() and (context[:2] == 0).all() and (context[2:] > 0).all()

    def test_the_mean_stands_in_and_is_of_the_last_micro_batches(self) -> None:
        model = made("context-split-tiny").model
        images = torch.randn(6, 2, 3, 64, 64)
        means = []
        for one in images:
            seen = model(one)
            means.append(model.recent[-1].clone())
            assert torch.equal(seen["weight"].flatten(), torch.tensor([3.0, 1.0]))
        torch.testing.assert_close(model.recent, torch.stack(means[-4:]))

    @pytest.mark.slow(reason="two traces; what the half computes and teaches is tested above")
    def test_the_detached_half_is_absent_from_gradient_memory(self) -> None:
        some, none = seen("context-split-tiny", ()), seen("context-split-tiny", ALONE)
        weight = 4 * 20 * 256
        assert held(some, GRADIENT, "head_context") == weight and held(none, GRADIENT, "head_context") == 0
        assert held(some, GRADIENT) - held(none, GRADIENT) == weight
        assert held(some, OPTIMIZER) - held(none, OPTIMIZER) == 2 * weight + 4
        assert not ops(none, "head_context", "backward")

    @pytest.mark.slow(reason="what is frozen has no gradient in the step that runs above, and no state in test_capture.py")
    def test_the_frozen_twin_keeps_nothing(self) -> None:
        trace = seen("context-split-tiny", CAM)
        assert held(trace, PARAMETER, "before_") > held(trace, PARAMETER) * 0.49
        assert saved(trace, "before_") == held(trace, GRADIENT, "before_") == held(trace, OPTIMIZER, "before_") == 0
        assert flops(trace, "before_trunk", "forward") == flops(trace, "trunk", "forward")
        assert flops(trace, "before_trunk", "backward") == 0 < flops(trace, "trunk", "backward")

    def test_overlap_counts_only_where_both_occur(self) -> None:
        work = made("context-split-tiny", method="cam")
        output = call_model(work.model, work.batch)
        logits, maps = output["logits"].detach(), torch.ones(2, 2, 4, 2, 2)
        none, both = torch.zeros(2, 20), torch.zeros(2, 20)
        both[:, [0, 4]] = 1.0
        found = [
            context_split.loss({"logits": logits, "maps": maps, "before": maps}, {"targets": targets})
            - torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
            for targets in (none, both)
        ]
        assert found[0].item() == 0.0 and found[1].item() == pytest.approx(0.1 * 4 / 4)


class TestPansharpen:
    def test_the_first_component_is_the_panchromatic_image_and_the_others_stay(self) -> None:
        work = made("pansharpen-tiny")
        cube, pan = work.batch["cube"], work.batch["pan"]
        mean, basis, scale, level = work.model.prepare(cube, pan)
        torch.testing.assert_close(basis.transpose(1, 2) @ basis, torch.eye(24).expand(2, -1, -1), atol=1e-5, rtol=0)
        parts = [
            torch.einsum("bck,bchw->bkhw", basis, one - mean) for one in (work.model(cube, pan), work.model.enlarge(cube))
        ]
        torch.testing.assert_close(parts[0][:, 1:], parts[1][:, 1:], atol=1e-5, rtol=0)
        torch.testing.assert_close(parts[0][:, :1], (pan - level) * scale, atol=1e-5, rtol=0)

    @pytest.mark.slow(reason="a long trace; what is decomposed is tested above")
    def test_the_decomposition_and_its_gradient_are_counted(self) -> None:
        trace = on_cpu("pansharpen-tiny", ())[2]
        found = [op for op in ops(trace) if op.name == "aten._linalg_svd.default"]
        assert [(op.phase, op.inputs[0].spec.shape) for op in found] == [("forward", (2, 24, 144))]
        assert (found[0].flops or 0) >= 2 * 6 * 144 * 24**2  # thin factors of every matrix
        backward = ops(trace, phase="backward")
        assert sum(op.name == "aten.bmm.default" and op.outputs[0].spec.shape == (2, 24, 24) for op in backward) >= 2

    def test_a_stage_steps_towards_both_images(self) -> None:
        stage = pansharpen.Stage(3, 2, 4).double()
        nn.init.zeros_(stage.denoise2.weight)
        nn.init.zeros_(stage.denoise2.bias)
        nn.init.constant_(stage.step, 0.2)
        x = torch.rand(1, 3, 4, 4, dtype=torch.double, requires_grad=True)
        cube, pan = torch.rand(1, 3, 2, 2, dtype=torch.double), torch.rand(1, 1, 4, 4, dtype=torch.double)
        far = torch.nn.functional.conv2d(x, stage.blur, stride=2, groups=3) - cube
        bright = torch.nn.functional.conv2d(x, stage.response) - pan
        (gradient,) = torch.autograd.grad((far.square().sum() + bright.square().sum()) / 2, x)
        torch.testing.assert_close(stage(x, cube, pan), x - 0.2 * gradient, atol=1e-12, rtol=0)

    @pytest.mark.parametrize(("method", "margin"), [("svd", 2), ("cnn", 3), ("unfold", 4)])
    def test_tiles_agree_with_the_whole_frame_at_the_seams(self, method: str, margin: int) -> None:
        work = made("pansharpen-tiny", method=method)
        cube, pan = work.batch["cube"], work.batch["pan"]
        with torch.no_grad():
            whole = work.model(cube, pan)
            pieces = pansharpen.tiled(work.model, cube, pan, 5, margin)
            without = pansharpen.tiled(work.model, cube, pan, 5, 0)
        assert (pieces - whole).abs().max() < 1e-5 < (without - whole).abs().max()

    @pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
    def test_memory_of_an_unfolded_iteration_is_linear_in_its_length(self) -> None:
        three = on_cuda("pansharpen-tiny", (("method", "unfold"),))
        two, four = (on_cuda("pansharpen-tiny", (("depth", depth), ("method", "unfold"))) for depth in (2, 4))
        kept = [saved(trace) for trace in (two, three, four)]
        assert kept[2] - kept[1] == kept[1] - kept[0] > 0


class TestWildlife:
    @pytest.mark.slow(reason="what is frozen has no gradient in the step that runs above, and no state in test_capture.py")
    def test_one_stage_is_trained_and_the_other_costs_no_state(self) -> None:
        for case, trained, frozen in (((), "detector", "classifier"), (CLASSIFIER, "classifier", "detector")):
            trace = seen("wildlife-tiny", case)
            assert held(trace, GRADIENT, trained) == held(trace, PARAMETER, trained) > 0
            assert held(trace, GRADIENT, frozen) == held(trace, OPTIMIZER, frozen) == saved(trace, frozen) == 0
            assert not ops(trace, frozen, "backward") and bool(ops(trace, frozen, "forward")) == (frozen == "detector")

    def test_a_frozen_detector_keeps_its_statistics(self) -> None:
        work = made("wildlife-tiny", phase="classifier")
        work.model.train()
        before = {name: one.clone() for name, one in work.model.detector.named_buffers()}
        compute_loss(work)
        assert all(torch.equal(one, before[name]) for name, one in work.model.detector.named_buffers())

    def test_a_crop_is_what_lies_in_the_box_and_a_box_found_again_is_struck_out(self) -> None:
        model = made("wildlife-tiny", phase="classifier").model
        images = torch.randn(1, 3, 128, 128)
        box = torch.tensor([[[0.25, 0.5, 0.5, 0.75]]])  # as large as a crop: 32 pixels
        torch.testing.assert_close(model.cut(images, box), images[:, :, 64:96, 32:64], atol=1e-4, rtol=0)
        assert wildlife.overlaps(box, box + torch.tensor([0.125, 0.0, 0.125, 0.0])).item() == pytest.approx(1 / 3)
        boxes, passed = model.candidates(images)
        kept = wildlife.overlaps(boxes, boxes)[0][:, passed[0]][passed[0]]
        assert passed.any() and (kept.triu(diagonal=1) <= 0.5).all()

    def test_what_does_not_pass_has_no_influence(self) -> None:
        work = made("wildlife-tiny", phase="classifier")
        output = call_model(work.model, work.batch)
        assert 0 < output["passed"].sum() < output["passed"].numel()
        other = {**output, "species": torch.where(output["passed"].flatten()[:, None], output["species"], 7.0)}
        assert torch.equal(wildlife.loss(output, work.batch), wildlife.loss(other, work.batch))

    @pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
    def test_memory_is_linear_in_the_bound_of_crops(self) -> None:
        six, more = seen("wildlife-tiny", CLASSIFIER), source("wildlife-tiny", phase="classifier", crops=12)
        twelve = capture(lambda: load(more), FP32, capability=None)
        assert saved(twelve, "classifier.stage") / saved(six, "classifier.stage") == pytest.approx(2.0, rel=0.02)
        assert saved(twelve) / saved(six) == pytest.approx(2.0, rel=0.02)  # the detector keeps nothing

    @pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
    def test_without_a_bound_all_may_pass_and_the_share_that_does_suffices(self) -> None:
        """The count of crops is the data's: a trace takes all of them, and with the share of real data is what is measured."""
        what = source("wildlife-tiny", phase="classifier", ragged=True, crops=12)
        whole = capture(lambda: load(what), FP32, capability=None)
        assert whole.meta["assumed"]
        torch.manual_seed(0)
        work = load(what)
        work.model.train()
        share = len(call_model(work.model, work.batch)["chosen"]) / 24
        assert 0 < share < 1
        trace = capture(lambda: load(what), FP32, capability=None, hints={"aten.nonzero.default": share})
        assert peak_live(trace, trace.schedule) == pytest.approx(measure_on_cpu(what, FP32)[0], rel=0.05)
        assert peak_live(whole, whole.schedule) > peak_live(trace, trace.schedule)
        assert trace.ops_without_flop_rule == ()


class TestGeo:
    def test_a_window_of_an_aligned_raster_is_its_pixels(self) -> None:
        pixels = torch.randn(3, 20, 30)
        found = geo.Raster(pixels, 100.0, 500.0, 10.0).read(torch.tensor([150.0]), torch.tensor([480.0]), 8, 10.0)
        torch.testing.assert_close(found[0], pixels[:, 2:10, 5:13], atol=1e-4, rtol=0)

    def test_rasters_of_any_grid_agree_about_a_place(self) -> None:
        """A plane over the ground, laid on two grids, is read alike through both."""
        west, north = torch.tensor([400.0, 700.0]), torch.tensor([-300.0, -500.0])
        found = []
        for metres, turn, corner in ((10.0, 0.0, (0.0, 0.0)), (20.0, 0.1, (-130.0, 70.0))):
            row, column = torch.meshgrid(*[(torch.arange(200) + 0.5) * metres] * 2, indexing="ij")
            cos, sin = math.cos(turn), math.sin(turn)
            east, south = corner[0] + column * cos - row * sin, -corner[1] + row * cos + column * sin
            found.append(geo.Raster((2.0 * east - south)[None], *corner, metres, turn).read(west, north, 16, 10.0))
        torch.testing.assert_close(found[0], found[1], atol=1.0, rtol=0)  # of values in the thousands
        assert found[0].std() > 50.0

    def test_windows_lie_where_all_rasters_have_data(self) -> None:
        bands, cover = geo.scene(32, 5)
        west, north = geo.windows([*bands, cover], 50, 320.0)
        for raster in (*bands, cover):
            left, low, right, high = raster.inside()
            assert (west >= left).all() and (west + 320.0 <= right).all() and (north <= high).all() and (north - 320.0 >= low).all()
            marked = raster._replace(pixels=torch.ones_like(raster.pixels[:1]))
            edge = torch.nn.functional.pad(marked.pixels[:, 1:-1, 1:-1], (1, 1, 1, 1))
            assert marked._replace(pixels=edge).read(west, north, 32, 10.0).min() > 0.999  # nothing of the edge is read
        with pytest.raises(ValueError, match="in common"):
            geo.windows([*bands, cover], 1, 1e6)

    def test_warping_beforehand_gives_the_windows_of_warping_while_reading(self) -> None:
        bands, cover = geo.scene(32, 5)
        corner = torch.tensor([600.0]), torch.tensor([-700.0])
        for raster, mode in ((bands[1], "bilinear"), (cover, "nearest")):
            whole = raster.read(*corner, 96, 10.0, mode)
            west, north = corner[0] + 10.0 * torch.tensor([0, 17, 50]), corner[1] - 10.0 * torch.tensor([8, 0, 63])
            found = raster.read(west, north, 32, 10.0, mode)
            for window, left, top in zip(found, (0, 17, 50), (8, 0, 63), strict=True):
                same = torch.isclose(window, whole[0, :, top : top + 32, left : left + 32], atol=1e-3)
                assert same.float().mean() > 0.999  # a class may change right on the edge of its pixel

    def test_more_bands_cost_the_first_convolution_alone(self) -> None:
        trace, plain = on_cuda("geo-tiny", ()), on_cuda("resnet-tiny", (("depth3", 2),))
        assert flops(trace, "stem.0", "forward") / flops(plain, "stem.0", "forward") == pytest.approx(13 / 3)
        assert flops(trace, "stage", "forward") == flops(plain, "stage", "forward")


class TestTNT:
    @pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
    def test_inner_and_outer_blocks_have_costs_of_their_own(self) -> None:
        trace = _traced("tnt-tiny", ())
        patches, pixels, samples = 16, 16, 2
        for path, tokens, dim in (("inner", samples * patches * pixels, 8), ("outer", samples * (patches + 1), 64)):
            layers = sum(flops(trace, f"blocks.0.{path}.{part}", "forward") for part in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down"))
            weights = 12 * dim * dim
            assert layers == 2 * tokens * weights
        inside = {path: flops(trace, f"blocks.{path}") for path in ("0.inner", "0.outer", "1.inner", "1.outer")}
        assert inside["0.inner"] == inside["1.inner"] and inside["0.outer"] == inside["1.outer"]
        assert sum(inside.values()) < flops(trace, "blocks") < flops(trace)
        inner, outer = (saved(trace, f"blocks.0.{path}") for path in ("inner", "outer"))
        assert inner > 1.5 * outer and inner + outer < saved(trace, "blocks.0")  # fewer FLOPs, but more numbers to keep

    @pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
    def test_the_heads_of_both_are_split(self) -> None:
        with torch.device("meta"):
            found = derive(record(made("tnt-tiny")), 2)
        rules = dict(found.rules)
        assert refusal(found) is None
        for path in ("inner", "outer"):
            assert rules[f"blocks.*.{path}.attn.qkv"] == "column:3" and rules[f"blocks.*.{path}.attn.proj"] == "row"


class TestRaftMLP:
    @pytest.mark.slow(reason="a larger image, really run")
    def test_memory_follows_the_resolution(self) -> None:
        small, large = on_cpu("raftmlp-tiny", ()), on_cpu("raftmlp-tiny", (("image", 96),))
        for predicted, measured, _ in (small, large):
            assert predicted == pytest.approx(measured, rel=0.05)
        assert saved(large[2]) / saved(small[2]) == pytest.approx(1.5**2, rel=0.1)

    @pytest.mark.slow(reason="a step of the model runs above; bytes of other modules are held against real steps")
    def test_a_plan_stays_valid_at_one_and_a_half_times_the_resolution(self) -> None:
        cluster, options = parse("H200"), Options(profile_of=find_profile)
        plans = [
            Plan(model={"model": "raftmlp-tiny", "overrides": {"image": image}}, hardware="H200", micro_batch=2, precision="fp32")
            for image in (64, 96)
        ]
        assert [legal.complaints(plan, facts_of(plan, cluster)) for plan in plans] == [(), ()]
        trace = on_cuda("raftmlp-tiny", (("image", 96),), 2, recipe_of(plans[1], KEEP))
        assert predict_plan({KEEP: trace}, plans[1], cluster, options).fits


SIZES = ((2, 64), (2, 128), (4, 64), (4, 128))


class TestScalingMLP:
    @pytest.mark.slow(reason="a size between; a step of it runs above, and bytes of another model are measured")
    @pytest.mark.parametrize(
        ("depth", "dim"), [pytest.param(*size, marks=() if size == (4, 64) else pytest.mark.slow(reason="another size")) for size in SIZES]
    )
    def test_four_sizes_are_as_measured(self, depth: int, dim: int) -> None:
        predicted, measured, trace = on_cpu("scaling-mlp-tiny", (("depth", depth), ("dim", dim)))
        assert predicted == pytest.approx(measured, rel=0.05)
        weights = 3 * 32 * 32 * dim + depth * 8 * dim * dim + dim * 10
        products = sum(op.flops or 0 for op in ops(trace, phase="forward") if op.name.endswith("mm.default"))
        assert products == 2 * 2 * weights

    @pytest.mark.slow(reason="four sizes of one model")
    def test_the_published_ladder_rises_in_memory_time_and_energy(self) -> None:
        answers = []
        for depth, dim in ((6, 512), (12, 512), (6, 1024), (12, 1024)):
            trace = on_cuda("scaling-mlp-b12", (("depth", depth), ("dim", dim)), 4096)
            answers.append(api.predict(trace, FP32, parse("H200"), {"micro_batch": 4096}))
        for smaller, larger in pairwise(answers):
            assert smaller.parameters < larger.parameters and smaller.model["flops"] < larger.model["flops"]
            assert smaller.memory.allocated_bytes < larger.memory.allocated_bytes
            assert smaller.time and larger.time and smaller.time.step_seconds < larger.time.step_seconds
            assert smaller.energy and larger.energy and smaller.energy.joules_per_step < larger.energy.joules_per_step
