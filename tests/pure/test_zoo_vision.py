"""The vision and operator models of the zoo: sizes as published, structure, training, tracing."""

from __future__ import annotations

import importlib
import inspect
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from foretell.zoo.generative import dit
from foretell.zoo.places import import_path
from foretell.zoo.science import fno
from foretell.zoo.vision import raftmlp, tnt, unet, vit
from tests.further import further, one_in

SMALL = {
    "vit": {"patch": 8, "dim": 32, "depth": 2, "heads": 4, "classes": 10, "image": 32},
    "resnet": {"depth1": 1, "depth2": 1, "depth3": 2, "depth4": 1, "width": 8, "classes": 10},
    "convnext": {"d1": 8, "d2": 16, "d3": 24, "d4": 32, "n1": 1, "n2": 1, "n3": 2, "n4": 1, "classes": 10},
    "unet": {"channels": 8, "levels": 2},
    "dit": {"depth": 2, "dim": 32, "heads": 4, "classes": 10, "image": 8},
    "tnt": {
        "depth": 2, "inner_dim": 8, "inner_heads": 2, "outer_dim": 32, "outer_heads": 4, "patch": 8, "classes": 10,
        "image": 32,
    },
    "raftmlp": {
        "dim1": 8, "dim2": 16, "dim3": 24, "dim4": 32, "n1": 1, "n2": 1, "n3": 2, "n4": 1, "classes": 10, "image": 32,
    },
    "scaling_mlp": {"depth": 2, "dim": 32, "classes": 10, "image": 16},
    "fno": {"modes": 4, "width": 8, "depth": 2, "image": 16},
}  # fmt: skip
FREE_SIDE = {"resnet": 64, "convnext": 32, "unet": 32}
STACKS = {
    "vit": ["blocks"],
    "resnet": ["stage1", "stage2", "stage3", "stage4"],
    "convnext": ["stage1", "stage2", "stage3", "stage4"],
    "unet": ["encoder", "decoder"],
    "dit": ["blocks"],
    "tnt": ["blocks"],
    "raftmlp": ["level1", "level2", "level3", "level4"],
    "scaling_mlp": ["blocks"],
    "fno": ["blocks"],
}
FALL_IN_15_STEPS = {"fno": 0.95, "unet": 0.85, "dit": 0.8}


pytestmark = pytest.mark.usefixtures("one_thread")


def zoo(name: str) -> ModuleType:
    return importlib.import_module(import_path(name))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def run(module: ModuleType, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    names = inspect.signature(model.forward).parameters
    output = model(**{name: tensor for name, tensor in batch.items() if name in names})
    return module.loss(output, batch)


@pytest.mark.parametrize(
    ("name", "config", "published"),
    [
        ("vit", {}, 86_567_656),
        ("vit", {"dim": 1024, "depth": 24, "heads": 16}, 304_326_632),
        ("resnet", {}, 25_557_032),
        ("convnext", {}, 88_591_464),
    ],
)
def test_parameter_count_is_the_published_one(name: str, config: dict[str, int], published: int) -> None:
    with torch.device("meta"):
        model = zoo(name).build(**config)
    assert count(model) == published


@pytest.mark.parametrize(
    ("name", "published", "tolerance"), [("dit", 675e6, 0.002), ("tnt", 23.8e6, 0.005), ("raftmlp", 9.9e6, 0.03)]
)
def test_parameter_count_is_near_the_published_one(name: str, published: float, tolerance: float) -> None:
    with torch.device("meta"):
        model = zoo(name).build()
    assert count(model) == pytest.approx(published, rel=tolerance)


def test_parameter_counts_by_hand() -> None:
    with torch.device("meta"):
        assert count(zoo("scaling_mlp").build()) == (
            (3 * 64 * 64 + 1) * 1024 + 12 * (2 * 1024 + 1025 * 4096 + 4097 * 1024) + 1025 * 1000
        )
        assert count(fno.build()) == (
            (4 * 128 + 129 * 64) + 4 * (2 * 2 * 64 * 64 * 16 * 16 + 65 * 64) + (65 * 128 + 129)
        )
        widths = [3, 64, 128, 256, 512, 1024]
        down = sum(9 * a * b + 9 * b * b + 4 * b for a, b in pairwise(widths))
        up = sum(4 * 2 * c * c + c + 9 * 2 * c * c + 9 * c * c + 4 * c for c in widths[1:-1])
        assert count(unet.build()) == down + up + 64 * 2 + 2


@pytest.mark.parametrize("name", SMALL)
def test_module_offers_three_functions_and_blocks(name: str) -> None:
    module = zoo(name)
    own = [f for f, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    assert sorted(own) == ["batch", "build", "loss"]
    stacks = [path for path, part in module.build(**SMALL[name]).named_modules() if isinstance(part, nn.ModuleList)]
    assert stacks == STACKS[name]


@pytest.mark.parametrize("name", one_in(3, SMALL, "another network; one in three learns, and each runs a step below"))
def test_small_variant_learns_one_batch(name: str) -> None:
    torch.manual_seed(0)
    module = zoo(name)
    model = module.build(**SMALL[name])
    batch = module.batch(model, 4, None, FREE_SIDE.get(name))
    if name == "fno":
        batch["targets"] = batch["field"].mean(dim=1, keepdim=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = run(module, model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < FALL_IN_15_STEPS.get(name, 0.3) * losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())


FULL_SIZE = pytest.mark.slow(reason="its small preset is traced in every other test here")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "vit" else FULL_SIZE) for name in SMALL])
def test_full_size_traces_on_fake_tensors(name: str) -> None:
    module = zoo(name)
    with FakeTensorMode():
        model = module.build()
        batch = module.batch(model, 2, None, None)
        loss = run(module, model, batch)
        loss.backward()
    assert isinstance(loss, FakeTensor)
    assert loss.shape == ()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("whole_model", further([False, True], [True], "under autocast, which traces in other files have"))
def test_runs_in_bfloat16(name: str, whole_model: bool) -> None:
    module = zoo(name)
    model = module.build(**SMALL[name])
    batch = module.batch(model, 2, None, FREE_SIDE.get(name))
    if whole_model:
        model.to(torch.bfloat16)
        batch = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in batch.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=not whole_model):
        loss = run(module, model, batch)
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("name", ["vit", "dit", "tnt", "raftmlp", "scaling_mlp"])
def test_batch_refuses_another_image_side(name: str) -> None:
    model = zoo(name).build(**SMALL[name])
    with pytest.raises(ValueError, match=rf"48 .*{model.image}"):
        zoo(name).batch(model, 1, None, 48)


def test_vit_attention_matches_the_textbook() -> None:
    torch.manual_seed(0)
    attention = vit.Attention(dim=12, heads=3)
    x = torch.randn(2, 5, 12)
    q, k, v = attention.qkv(x).split(12, dim=-1)
    heads = []
    for h in range(3):
        part = slice(4 * h, 4 * h + 4)
        weights = (q[..., part] @ k[..., part].transpose(1, 2) / 2).softmax(dim=-1)
        heads.append(weights @ v[..., part])
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(heads, dim=-1)))


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 7), (6, 10)])
def test_spectral_convolution_against_the_full_complex_transform(height: int, width: int) -> None:
    torch.manual_seed(0)
    m = 3
    layer = fno.SpectralConv2d(2, 4, m)
    for weight in layer.parameters():
        nn.init.normal_(weight)
    x = torch.randn(3, 2, height, width)
    spectrum = torch.fft.fft2(x.to(torch.complex128))
    output = torch.zeros(3, 4, height, width, dtype=torch.complex128)
    for row in range(m):
        for column in range(m):
            mirrored = 1 if column == 0 else 2
            for place, weight in ((row, layer.positive[:, :, row]), (height - m + row, layer.negative[:, :, row])):
                real, imaginary = weight[:, :, column].double().unbind(-1)
                matrix = torch.complex(real, imaginary)
                output[:, :, place, column] = mirrored * (spectrum[:, :, place, column] @ matrix)
    expected = torch.fft.ifft2(output).real.float()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_spectral_convolution_stays_in_fp32_under_autocast() -> None:
    torch.manual_seed(0)
    layer = fno.SpectralConv2d(4, 4, 3)
    x = torch.randn(2, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = layer(x)
        from_bfloat16 = layer(x.bfloat16())
    torch.testing.assert_close(under_autocast, layer(x), rtol=0, atol=0)
    assert from_bfloat16.dtype == torch.float32


def test_fno_takes_a_finer_grid() -> None:
    model = fno.build(**SMALL["fno"])
    assert model(fno.batch(model, 2, None, 24)["field"]).shape == (2, 1, 24, 24)
    with pytest.raises(ValueError, match="4 modes"):
        fno.batch(model, 2, None, 6)


def test_fno_loss_is_relative() -> None:
    targets = torch.randn(3, 1, 4, 4)
    assert fno.loss(torch.zeros_like(targets), {"targets": targets}).item() == pytest.approx(1.0)
    assert fno.loss(1.5 * targets, {"targets": targets}).item() == pytest.approx(0.5)


def test_dit_blocks_start_as_the_identity() -> None:
    torch.manual_seed(0)
    model = dit.build(**SMALL["dit"])
    x, condition = torch.randn(2, 16, 32), torch.randn(2, 32)
    for block in model.blocks:
        torch.testing.assert_close(block(x, condition), x, rtol=0, atol=0)
        nn.init.ones_(block.modulation[1].bias)
        assert not torch.allclose(block(x, condition), x)


def test_dit_predicts_noise_and_sigma_patch_by_patch() -> None:
    torch.manual_seed(0)
    model = dit.build(**SMALL["dit"])
    batch = dit.batch(model, 2, None, None)
    nn.init.normal_(model.final.linear.weight)
    seen: dict[str, Tensor] = {}
    model.final.register_forward_hook(lambda module, inputs, output: seen.update(tokens=output))
    output = model(batch["x"], batch["t"], batch["y"])
    assert output.shape == (2, 8, 8, 8)
    patch = output[0, :, 2:4, 4:6].permute(1, 2, 0).flatten()
    torch.testing.assert_close(patch, seen["tokens"][0, 1 * 4 + 2], rtol=0, atol=0)
    noise_only = torch.cat([batch["noise"], torch.full_like(batch["noise"], 7.0)], dim=1)
    assert dit.loss(noise_only, batch).item() == 0


def test_unet_keeps_the_spatial_size() -> None:
    model = unet.build(channels=4, levels=3, classes=5, in_channels=2)
    batch = unet.batch(model, 2, None, 40)
    assert batch["images"].shape == (2, 2, 40, 40)
    assert model(batch["images"]).shape == (2, 5, 40, 40)
    with pytest.raises(ValueError, match="36"):
        unet.batch(model, 2, None, 36)


def test_tnt_inner_and_outer_shapes() -> None:
    model = tnt.build(**SMALL["tnt"])
    shapes: list[tuple[torch.Size, torch.Size]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: shapes.append((output[0].shape, output[1].shape)))
    assert model(tnt.batch(model, 3, None, None)["images"]).shape == (3, 10)
    assert shapes == [((3 * 16, 16, 8), (3, 17, 32))] * 2


def test_tnt_pixel_tokens_belong_to_their_patch() -> None:
    embedding = tnt.PixelEmbedding(inner_dim=8, patch=8)
    nn.init.zeros_(embedding.positions)
    images = torch.randn(2, 3, 32, 32)
    tokens, grid = embedding(images), embedding.conv(images)
    window = grid[1, :, 4 * 2 : 4 * 3, 4 * 1 : 4 * 2].flatten(1).T
    torch.testing.assert_close(tokens[16 + 2 * 4 + 1], window, rtol=0, atol=0)


def test_raft_mixing_stays_in_its_line_and_joins_rafts() -> None:
    torch.manual_seed(0)
    mixing = raftmlp.RaftMixing(dim=6, side=4, raft=2)
    mixing.norm = nn.Identity()
    x = torch.randn(1, 4, 5, 6)
    changed = x.clone()
    changed[0, 1, 2, 1] += 1
    moved = (mixing(changed) - mixing(x)).abs() > 1e-6
    expected = torch.zeros_like(moved)
    expected[0, :, 2, 1] = expected[0, :, 2, 4] = True
    assert torch.equal(moved, expected)
