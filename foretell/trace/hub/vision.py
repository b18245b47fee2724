"""Models of timm (`timm:NAME`) and torchvision (`torchvision:NAME`): classifiers, segmentation, detection, films, optical flow."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import UnknownName, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foretell.trace.load.model import Source
    from foretell.trace.record.step import Workload

IMAGE, SEGMENTED, SEEN, FLOW = 224, 480, (480, 640), (368, 496)
"""Sides of pictures where nothing says otherwise: of classifiers, and as the recipes of the others crop or find them."""
FRAMES, OBJECTS, POINTS = 16, 8, 17
"""Frames of a film; things in a picture; joints of a person."""
_SMALL_FILMS = ("mc3_18", "r2plus1d_18", "r3d_18")
_ROI = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_OF = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_STRIDES = "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups"
_DEFORM = f"Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_STRIDES}, bool use_mask"
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_ROI}, {_OF}, int sampling_ratio, bool aligned) -> Tensor",
    f"qroi_align(Tensor input, Tensor rois, {_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_ROI}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_ROI}, {_OF}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_ROI}, int sampling_ratio, {_OF}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_ROI}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_ROI}, {_OF}) -> Tensor",
    f"deform_conv2d(Tensor input, {_DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, Tensor input, {_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""What torchvision's compiled library declares."""
_stubs: list[Any] = []
"""Keeps the declared operators alive: a library that is collected takes them along."""


def mend_torchvision() -> None:
    """Make `import torchvision` work beside a torch it was not built for.

    Its compiled operators then fail to load and registering their shapes fails with them. A trace needs no kernels:
    declaring the operators is enough, and torchvision's own Python gives their shapes and gradients.
    """
    if importlib.util.find_spec("torchvision") is None or _stubs:
        return
    try:
        importlib.import_module("torchvision")
    except (RuntimeError, ImportError, OSError):
        _declare()
        importlib.import_module("torchvision")
    _find_samples()


SAMPLED = "torchvision's detectors are taken to find as many samples, positive and negative, as they look for"


def _find_samples() -> None:
    """Which boxes a detector trains on depends on what it has learned; how many, its sampler says: on fake tensors it finds them."""
    sampler = importlib.import_module("torchvision.models.detection._utils").BalancedPositiveNegativeSampler
    plain = sampler.__call__

    def call(self: Any, matched_idxs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        import torch
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        from foretell.trace.record.values import attach, is_small

        mode = getattr(matched_idxs[0], "fake_mode", None)
        if mode is None:
            found: tuple[list[Tensor], list[Tensor]] = plain(self, matched_idxs)
            return found
        told: set[str] = getattr(mode, "assumed", set())
        told.add(SAMPLED)
        masks = []
        for matched in matched_idxs:
            place = torch.arange(matched.numel())
            positive = min(matched.numel(), int(self.batch_size_per_image * self.positive_fraction))
            rest = (place >= positive) & (place < self.batch_size_per_image)
            masks.append(((place < positive).to(torch.uint8), rest.to(torch.uint8)))
            if is_small(matched):  # heads ask again which boxes are of something
                with unset_fake_temporarily():
                    attach(matched, (torch.arange(matched.numel()) < positive).to(matched.dtype).view(matched.shape))
        return [one for one, _ in masks], [one for _, one in masks]

    sampler.__call__ = call


def _declare() -> None:
    import torch

    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in _OPERATORS:
        if not hasattr(torch.ops.torchvision, operator.partition("(")[0]):
            library.define(operator)
    library.define("_cuda_version() -> int")
    library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")
    _stubs.append(library)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    bare = types.ModuleType("torchvision")
    bare.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["torchvision"] = bare
    try:
        extension = importlib.import_module("torchvision.extension")
        extension._has_ops = lambda: True  # type: ignore[attr-defined]
    finally:
        del sys.modules["torchvision"]


# --- timm ------------------------------------------------------------------------------------------------------------


def load_timm(source: Source, name: str, notes: list[str]) -> Workload:
    timm = importlib.import_module("timm")
    if not timm.is_model(name):
        raise UnknownName("timm model", name, timm.list_models(), "timm.list_models() has all")
    reject_files(source, ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"))
    options = dict(source.overrides)
    fixed = getattr(timm.models.get_pretrained_cfg(name, allow_unregistered=False), "fixed_input_size", False)
    if source.image is not None and fixed:
        options.setdefault("img_size", source.image)
    model = timm.create_model(name, pretrained=False, **options)
    channels, *sides = (model.pretrained_cfg if hasattr(model, "pretrained_cfg") else model.default_cfg)["input_size"]
    side: Any = source.image or options.get("img_size") or sides
    high, wide = (side, side) if isinstance(side, int) else side
    shape = (source.micro_batch, options.get("in_chans", channels), high, wide)
    return classifier(model, shape, getattr(model, "num_classes", 0), notes)


def reject_files(source: Source, names: tuple[str, ...]) -> None:
    """Settings that would read weights: models are built without any."""
    for name in source.overrides:
        if name in names:
            raise UserError(f"'{name}' of {source.model} names files of weights", "models are built without weights; leave it out")


# --- torchvision -----------------------------------------------------------------------------------------------------


def load_torchvision(source: Source, name: str, notes: list[str]) -> Workload:
    models = importlib.import_module("torchvision.models")
    known = models.list_models()
    if name not in known:
        raise UnknownName("torchvision model", name, known, "torchvision.models.list_models() has all")
    options = dict(source.overrides)
    if source.image is not None and name.startswith("vit_"):
        options.setdefault("image_size", source.image)
    kind = next((one for one in _OTHERS if name in models.list_models(module=getattr(models, one))), "")
    if kind in ("detection", "segmentation"):
        options.setdefault("weights_backbone", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The default weight initialization")
        model = models.get_model(name, weights=None, **options)
    if kind:
        return _OTHERS[kind](source, model, name, options)
    side: Any = source.image or getattr(model, "image_size", 299 if "inception" in name else IMAGE)
    return classifier(model, (source.micro_batch, 3, side, side), options.get("num_classes", 1000), notes)


def classifier(model: nn.Module, shape: tuple[int, ...], classes: int, notes: list[str]) -> Workload:
    """A batch of pictures under the name the model gives its input, with random targets beside them."""
    import torch

    from foretell.trace.hub.loss import own_loss
    from foretell.trace.record.step import Workload

    name = next(iter(inspect.signature(model.forward).parameters))
    batch = {name: torch.randn(shape)}
    if not classes:
        notes.append(f"{type(model).__name__} has no classes: the mean of its first output stands in for a loss")
        return Workload(model, batch, own_loss)
    return Workload(model, {**batch, "targets": torch.randint(0, classes, shape[:1])}, _cross_entropy)


def _cross_entropy(output: Any, batch: Any) -> Tensor:
    """Of the first output, where auxiliary heads return more than one."""
    from torch.nn.functional import cross_entropy

    return cross_entropy((output[0] if isinstance(output, tuple) else output).float(), batch["targets"])


def _films(source: Source, model: nn.Module, name: str, options: Mapping[str, Any]) -> Workload:
    side = source.image or (112 if name in _SMALL_FILMS else IMAGE)
    return classifier(model, (source.micro_batch, 3, FRAMES, side, side), options.get("num_classes", 400), [])


def _segmented(source: Source, model: nn.Module, name: str, options: Mapping[str, Any]) -> Workload:
    import torch

    from foretell.trace.record.step import Workload

    side, n = source.image or SEGMENTED, source.micro_batch
    taken = next(iter(inspect.signature(model.forward).parameters))
    batch = {taken: torch.randn(n, 3, side, side), "targets": torch.randint(0, options.get("num_classes", 21), (n, side, side))}
    return Workload(model, batch, _pixels_loss)


def _pixels_loss(output: Any, batch: Any) -> Tensor:
    """As torchvision's recipe: half of the auxiliary head's on top."""
    from torch.nn.functional import cross_entropy

    loss = cross_entropy(output["out"].float(), batch["targets"])
    return loss + 0.5 * cross_entropy(output["aux"].float(), batch["targets"]) if "aux" in output else loss


def _detected(source: Source, model: nn.Module, name: str, options: Mapping[str, Any]) -> Workload:
    """Pictures with a few things in each, and what every family wants to know of them."""
    import torch

    from foretell.trace.record.step import Workload

    high, wide = (source.image, source.image) if source.image else SEEN
    targets = []
    for _ in range(source.micro_batch):
        starts = torch.arange(OBJECTS).float()[:, None] * torch.tensor([wide / 2 / OBJECTS, high / 2 / OBJECTS])
        boxes = torch.cat([starts, starts + torch.tensor([wide / 4, high / 4])], 1)
        classes = 2 if name.startswith("keypoint") else options.get("num_classes", 91)
        target = {"boxes": boxes, "labels": torch.arange(OBJECTS) % (classes - 1) + 1}
        if name.startswith("mask"):
            target["masks"] = torch.ones(OBJECTS, high, wide, dtype=torch.uint8)
        if name.startswith("keypoint"):
            middle = torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, torch.ones(OBJECTS, 1)], 1)
            target["keypoints"] = middle[:, None].repeat(1, POINTS, 1)
        targets.append(target)
    batch = {"images": [torch.rand(3, high, wide) for _ in range(source.micro_batch)], "targets": targets}
    return Workload(model, batch, _sum_of_losses)


def _sum_of_losses(output: Any, batch: Any) -> Tensor:
    loss: Tensor = sum(output.values())
    return loss


def _flows(source: Source, model: nn.Module, name: str, options: Mapping[str, Any]) -> Workload:
    import torch

    from foretell.trace.record.step import Workload

    high, wide = (source.image, source.image) if source.image else FLOW
    n = source.micro_batch
    batch = {"image1": torch.randn(n, 3, high, wide), "image2": torch.randn(n, 3, high, wide), "flow": torch.randn(n, 2, high, wide)}
    return Workload(model, batch, _flow_loss)


def _flow_loss(output: Any, batch: Any) -> Tensor:
    losses: list[Tensor] = [(flow.float() - batch["flow"]).abs().mean() for flow in output]
    return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])


_OTHERS = {"detection": _detected, "segmentation": _segmented, "video": _films, "optical_flow": _flows}
