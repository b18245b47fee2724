"""Pictures, films and sound for models of transformers: how each family wants them laid out, and how many tokens they become.

    layouts    what a batch may look like, the likeliest first; which it is, the model is asked (`first_that_runs`)
    tokens     of the text that stand for a picture: as many as the model makes features of it
"""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from foretell.trace.hub.classes import MEDIA

if TYPE_CHECKING:
    from foretell.trace.load.model import Source

Layout = dict[str, Any]
SAMPLES, IMAGE, GRID_IMAGE, FRAMES = 160_000, 224, 448, 16
"""Ten seconds of sound at 16 kHz; pixels of a side, where the config names none, and where any size may be given; frames of a film."""
PATIENCE = 15.0
"""CPU seconds after which a model is not asked any further."""
_SIDES = (448, 512, 384, 336, 1024, 1536)
"""Of pictures, where the config's own is not taken."""
_LINES = ((48, 320), (32, 128))
"""Of pictures of a line of text."""
_TILES = (3, 5, 2, 1, 4)
"""Crops that families cut a picture into."""


@contextmanager
def answering() -> Iterator[None]:
    """Questions about values have an assumed answer, where the ambient mode can give one."""
    import torch

    mode: Any = getattr(torch.empty(0), "fake_mode", None)
    before, log = getattr(mode, "patient", None), logging.getLogger("torch._subclasses.fake_tensor")
    level, assumed = log.level, set(getattr(mode, "assumed", ()))
    log.setLevel(logging.CRITICAL)  # a layout that is refused is no news
    try:
        if before is not None:
            mode.patient = False
        yield
    finally:
        log.setLevel(level)
        if before is not None:
            mode.patient, mode.assumed = before, assumed


def tried(function: Callable[..., Any], layout: Layout) -> Any:
    """What a function of the model gives for a layout; None where it refuses it."""
    import torch

    takes = inspect.signature(function).parameters
    whole = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    model: Any = getattr(function, "__self__", None)
    was = [(module, module.training) for module in model.modules()] if isinstance(model, torch.nn.Module) else []
    try:
        for module, _ in was:
            module.training = False
        with torch.no_grad(), answering():
            return function(**{key: value for key, value in layout.items() if whole or key in takes})
    except Exception:
        return None
    finally:
        for module, training in was:
            module.training = training


def first_that_runs(function: Callable[..., Any], layouts: Iterable[Layout]) -> tuple[Layout, Any] | None:
    """The first layout that a function of the model takes, and what it gives; none where asking takes too long."""
    begun = time.process_time()
    for layout in layouts:
        found = tried(function, layout)
        if found is not None:
            return layout, found
        if time.process_time() - begun > PATIENCE:
            break
    return None


def asked(model: Any, name: str) -> Callable[..., Any] | None:
    """`get_image_features` and its kin, of the model or what it wraps."""
    for owner in (model, getattr(model, "model", None), getattr(model, "base_model", None)):
        found: Callable[..., Any] | None = getattr(owner, name, None)
        if callable(found):
            return found
    return None


def count(features: Any) -> int:
    """Rows of features: the tokens that stand for them."""
    import torch

    for name in ("pooler_output", "last_hidden_state"):
        if getattr(features, name, None) is not None:
            features = getattr(features, name)
            break
    if isinstance(features, torch.Tensor):
        return features.numel() // max(1, features.shape[-1])
    if isinstance(features, (list, tuple)):
        rows = [one for one in features if isinstance(one, torch.Tensor)]
        same = [one for one in rows if one.shape[-1] == rows[0].shape[-1]]
        return sum(one.numel() // max(1, one.shape[-1]) for one in same)
    return 0


def part_of(config: Any, *words: str) -> Any:
    """The config of the part that sees or hears, else the config itself."""
    for name in MEDIA:
        if any(word in name for word in words) and getattr(config, name, None) is not None:
            return getattr(config, name)
    return config


def first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


# --- pictures ----------------------------------------------------------------------------------------------------------


def sides(source: Source, config: Any, otherwise: int = IMAGE) -> tuple[int, int]:
    size = source.image or first(config, "image_size", "img_size", "input_size")
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge")
    if size is None:
        size = next((inner for part in ("backbone_config", "vit_config") if (inner := first(getattr(config, part, None), "image_size"))), otherwise)
    return (size, size) if isinstance(size, int) else (int(size[-2]), int(size[-1]))


def picture_layouts(source: Source, model: Any, name: str, takes: Iterable[str]) -> Iterator[Layout]:
    """For the input of this name, with what goes along with it."""
    import torch

    takes, config = set(takes), model.config
    vision = part_of(config, "vision", "image", "perception")
    n, channels = source.micro_batch, first(vision, "num_channels", "in_channels", "in_chans") or 3
    channels = channels if isinstance(channels, int) else 3
    grid = next((one for one in ("image_grid_thw", "grid_thw", "image_grid_hws", "grid_hws") if one in takes), None)
    if grid is not None:
        yield from _grids(source, model, vision, name, grid, takes)
        return
    high, wide = sides(source, vision)
    patch = number(first(vision, "patch_size")) or 16
    if "spatial_shapes" in takes:
        rows, columns = high // patch, wide // patch
        shapes, mask = torch.tensor([[rows, columns]] * n), torch.ones(n, rows * columns, dtype=torch.int64)
        yield {name: torch.randn(n, rows * columns, channels * patch**2), "spatial_shapes": shapes, "pixel_attention_mask": mask}
        return
    if "aspect_ratio_ids" in takes:
        tiles = first(vision, "max_num_tiles") or 4
        ones = torch.ones(n, 1, tiles, dtype=torch.int64)
        ids = torch.ones(n, 1, dtype=torch.int64)
        yield {name: torch.randn(n, 1, tiles, channels, high, wide), "aspect_ratio_ids": ids, "aspect_ratio_mask": ones}
        return
    if "image_position_ids" in takes or "pixel_position_ids" in takes:
        yield _placed(n, vision, name, channels, patch, takes)
        return
    tiled = ("image_sizes" in takes and bool(getattr(config, "image_grid_pinpoints", None))) or "pixel_attention_mask" in takes
    counts = (1, 0) if "pixel_attention_mask" in takes else (*_TILES, 0) if tiled else (0, 1, *_TILES)
    others = [*((side, side) for side in _SIDES), *_LINES] if source.image is None else []
    for tall, broad in dict.fromkeys([(high, wide), *others]):
        more: Layout = {"image_sizes": torch.tensor([[tall, broad]] * n)} if "image_sizes" in takes else {}
        for count in counts if (tall, broad) == (high, wide) else counts[:2]:
            shape = (n, count, channels, tall, broad) if count else (n, channels, tall, broad)
            yield {name: torch.randn(shape), **more}
            if more:
                yield {name: torch.randn(shape)}
            if count and "pixel_attention_mask" in takes:  # which of the pictures are there
                yield {name: torch.randn(shape), "pixel_attention_mask": torch.ones(n, count, dtype=torch.bool)}


def number(value: Any) -> int | None:
    if isinstance(value, (list, tuple)) and value:
        value = value[-1]
    return value if isinstance(value, int) else None


def _placed(n: int, vision: Any, name: str, channels: int, patch: int, takes: set[str]) -> Layout:
    """Patches with their places."""
    import torch

    per = GRID_IMAGE // (patch * (first(vision, "pooling_kernel_size") or 1)) * (first(vision, "pooling_kernel_size") or 1)
    places = torch.stack([torch.arange(per * per) % per, torch.arange(per * per) // per], -1).expand(n, -1, -1).contiguous()
    where = "image_position_ids" if "image_position_ids" in takes else "pixel_position_ids"
    return {name: torch.randn(n, per * per, channels * patch**2), where: places}


def _grids(source: Source, model: Any, vision: Any, name: str, grid: str, takes: set[str]) -> Iterator[Layout]:
    """All patches of all pictures in one row, with the rows and columns of each picture beside them."""
    import torch
    from torch import nn

    n, patch = source.micro_batch, number(first(vision, "patch_size")) or 14
    merge = number(first(vision, "spatial_merge_size", "merge_size", "merge_kernel_size")) or 2
    size = source.image or number(first(vision, "image_size")) or GRID_IMAGE
    per = max(1, min(size, 1024) // (patch * merge)) * merge
    tower = next((one for path in ("visual", "vision_tower", "vision_model", "model.visual", "model.vision_tower", "model.vision_model")
                  if (one := _inside(model, path)) is not None), model)  # fmt: skip
    width = channels = None
    for module in tower.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d, nn.Linear)):
            width = module.weight[0].numel()
            channels = module.weight.shape[1] if not isinstance(module, nn.Linear) else None
            break
    size_of = [[1, per, per]] if grid.endswith("thw") else [[per, per]]
    more: Layout = {grid: torch.tensor(size_of * n)}
    if "image_merge_sizes" in takes or "merge_sizes" in takes:
        more["image_merge_sizes" if "image_merge_sizes" in takes else "merge_sizes"] = torch.tensor([merge] * n)
    rows = n * per * per
    temporal = first(vision, "temporal_patch_size") or 1
    colours = channels or 3
    for shape in ((rows, width or 3 * patch**2), (rows, colours, patch, patch), (1, rows, colours, patch, patch), (rows, 3 * temporal * patch**2)):
        yield {name: torch.randn(shape), **more}


def _inside(model: Any, path: str) -> Any:
    for part in path.split("."):
        model = getattr(model, part, None)
    return model


def film_layouts(source: Source, model: Any, name: str, takes: Iterable[str]) -> Iterator[Layout]:
    import torch

    config = model.config
    vision = part_of(config, "vision", "image")
    n, channels = source.micro_batch, first(vision, "num_channels", "in_chans", "in_channels") or 3
    frames = first(vision, "num_frames", "frames_per_clip") or FRAMES
    high, wide = sides(source, vision if first(vision, "image_size", "crop_size") else config)
    if first(vision, "crop_size") and not source.image:
        high = wide = first(vision, "crop_size")
    for count in (frames, 8, 4):
        yield {name: torch.randn(n, count, channels, high, wide)}


# --- sound -------------------------------------------------------------------------------------------------------------


def sound_layouts(source: Source, model: Any, name: str, takes: Iterable[str]) -> Iterator[Layout]:
    """Spectrograms as each family lays them out, or raw samples."""
    import torch

    takes, config, n = set(takes), model.config, source.micro_batch
    part = part_of(config, "audio", "encoder")
    bins = first(part, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_feat_size", "mel_bins", "input_dim", "n_mels",
                 "feature_size", "input_size")  # fmt: skip
    if name == "input_values" and not first(part, "max_length"):
        samples = source.seq or SAMPLES
        channels = first(part, "audio_channels", "channels") or 1
        for shape in ((n, samples), (n, channels, samples), (n, samples // 160, bins or 80), (n, bins or 80, samples // 160)):
            yield {name: torch.randn(shape)}
        return
    widths = list(dict.fromkeys([*([bins] if isinstance(bins, int) else []), *heard(model)]))
    places = first(part, "max_source_positions") if first(part, "num_mel_bins") else None  # its first convolutions halve the frames
    frames = [source.seq] if source.seq and "input_ids" not in takes else []  # else it is the text's
    frames += [2 * places] if places else []
    frames += [first(part, "max_length", "spectrogram_length") or 1024, 3000, 1000]
    for count, bins in itertools.product(frames, widths):
        flat, up = (n, count, bins), (n, bins, count)
        shapes: tuple[tuple[int, ...], ...] = (up, flat, (n, 1, count, bins)) if places else (flat, up, (n, 1, count, bins))
        for size in shapes:
            for masked in (True, False):
                mask = torch.ones(n, count, dtype=torch.int64)
                masks = {one: mask for one in takes if one in _MASKS and masked}
                if masks or not masked:
                    yield {name: torch.randn(size), **masks}


def heard(model: Any) -> Iterator[int]:
    """Bins of a spectrogram, by the first layers that could take one."""
    from torch import nn

    kinds: list[Any] = [nn.Conv1d, nn.Linear]
    for module in model.modules():
        kind = next((one for one in kinds if isinstance(module, one)), None)
        if kind is not None and (wide := module.weight.shape[1]) > 1:
            kinds.remove(kind)
            yield int(wide)
    yield 128


_MASKS = ("feature_attention_mask", "input_features_mask", "audio_attention_mask", "audio_mel_mask")
