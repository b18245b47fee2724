"""Images: segmentation, token mixing without attention, frozen halves, many bands, crops."""

from __future__ import annotations

from foretell.zoo.entry import Entry

STRIPS = "a strip sees the strips beside it: an image cut over ranks needs their edges; sharing positions is refused with the reason"
MERGED = "every block has fewer tokens, FLOPs and kept bytes than the one before; frozen weights have no gradient and no optimizer state"
DETACHED = (
    "what only exclusive images would teach is detached: its gradient is nowhere in memory, and the frozen twin keeps nothing; "
    "not handled: a bundle that re-runs bit-equal, since `report` has no such option"
)
TILED = (
    "an SVD has FLOPs and a gradient of its own; it needs the whole frame, while the rest goes in tiles that agree at the seams; "
    "not handled: seconds of an SVD on a GPU, which are taken from its bytes, since none was measured"
)
CROPS = (
    "the second network sees as many crops as the first finds: a bound, or with ragged=True a hint of the share that passes; "
    "not handled: the two stages on separate devices, since a plan cuts one stack of blocks, and serving a folder of images"
)
WARPED = (
    "warping while reading or beforehand gives the same windows; not handled: choosing between them so that the device does not "
    "wait, since nothing prices the work of a data loader, only the step"
)

_KMAX = (
    Entry(
        "kmax",
        "kmax",
        {"width": 64, "dim": 256, "heads": 8, "axial": 5, "clusters": 128, "classes": 134, "objects": 40, "image": 1280},
        "image",
        "kMaX-DeepLab with ResNet-50 for COCO, 36M",
        image=1280,
        paper="kMaX-DeepLab",
        task="seg",
        motif="argmax assignment, scatter, long pixel sequences",
        trap="the argmax assignment has no backward, yet its one-hot is kept; recompute pays only once pixel sequences are long",
    ),
    Entry(
        "kmax-tiny",
        "kmax",
        {
            "depth1": 1,
            "depth2": 1,
            "depth3": 1,
            "depth4": 1,
            "width": 8,
            "dim": 64,
            "heads": 2,
            "axial": 1,
            "per_stride": 2,
            "clusters": 64,
            "classes": 7,
            "objects": 3,
            "image": 128,
        },
        "image",
        "kMaX-DeepLab, six k-means blocks",
        image=128,
        small=True,
        paper="kMaX-DeepLab",
        task="seg",
        motif="argmax assignment, scatter, long pixel sequences",
        trap="the argmax assignment has no backward, yet its one-hot is kept; recompute pays only once pixel sequences are long",
    ),
)

_STRIP_MLP = (
    Entry(
        "strip-mlp",
        "strip_mlp",
        {"dim": 80, "n1": 2, "n2": 2, "n3": 6, "n4": 2, "patches": 4, "reach": 1, "window": 7, "classes": 1000, "image": 224},
        "image",
        "Strip-MLP at the depths of its smallest published size, 12.5M",
        image=224,
        paper="Strip-MLP",
        task="cls",
        motif="tokens mixed by rows and columns, neighbouring strips",
        trap=STRIPS,
    ),
    Entry(
        "strip-mlp-tiny",
        "strip_mlp",
        {"dim": 16, "n1": 1, "n2": 1, "n3": 2, "n4": 1, "patches": 2, "reach": 1, "window": 5, "classes": 10, "image": 64},
        "image",
        "Strip-MLP, five blocks",
        image=64,
        small=True,
        paper="Strip-MLP",
        task="cls",
        motif="tokens mixed by rows and columns, neighbouring strips",
        trap=STRIPS,
    ),
)

_PYRA = (
    Entry(
        "pyra",
        "pyra",
        {"patch": 16, "dim": 768, "depth": 12, "heads": 12, "merge": 16, "rank": 8, "classes": 100, "image": 224},
        "image",
        "PYRA on a frozen ViT-B/16, 16 tokens merged a block",
        image=224,
        paper="PYRA",
        task="cls",
        motif="token merging by sort and scatter, frozen half",
        trap=MERGED,
    ),
    Entry(
        "pyra-tiny",
        "pyra",
        {"patch": 8, "dim": 64, "depth": 4, "heads": 4, "merge": 24, "rank": 4, "classes": 10, "image": 96},
        "image",
        "PYRA on a frozen ViT of four blocks, 145 tokens down to 49",
        image=96,
        small=True,
        paper="PYRA",
        task="cls",
        motif="token merging by sort and scatter, frozen half",
        trap=MERGED,
    ),
)

_CONTEXT_SPLIT = (
    Entry(
        "context-split",
        "context_split",
        {"method": "split", "width": 64, "classes": 171, "pairs": 20, "exclusive": 0.5, "memory": 10},
        "image",
        "Feature split of ResNet-50 for COCO-Stuff; method=cam for the overlap of activation maps",
        image=224,
        paper="[Re] Don't Judge an Object by Its Context",
        task="cls",
        motif="half-detached features, running means, frozen twin",
        trap=DETACHED,
    ),
    Entry(
        "context-split-tiny",
        "context_split",
        {
            "method": "split",
            "depth1": 1,
            "depth2": 1,
            "depth3": 2,
            "depth4": 1,
            "width": 16,
            "classes": 20,
            "pairs": 4,
            "exclusive": 0.5,
            "memory": 4,
        },
        "image",
        "Feature split of a ResNet of five bottlenecks",
        image=64,
        small=True,
        paper="[Re] Don't Judge an Object by Its Context",
        task="cls",
        motif="half-detached features, running means, frozen twin",
        trap=DETACHED,
    ),
)

_PANSHARPEN = (
    Entry(
        "pansharpen",
        "pansharpen",
        {"method": "svd", "bands": 102, "ratio": 4, "width": 128, "depth": 8, "image": 160},
        "image",
        "Pansharpening of 102 bands by SVD component substitution; method=cnn or unfold for the learned ones",
        image=160,
        paper="Hyperspectral Pansharpening toolbox",
        task="fuse",
        motif="SVD with its gradient, unrolled iteration, many bands",
        trap=TILED,
    ),
    Entry(
        "pansharpen-tiny",
        "pansharpen",
        {"method": "svd", "bands": 24, "ratio": 4, "width": 32, "depth": 3, "image": 48},
        "image",
        "Pansharpening of 24 bands",
        image=48,
        small=True,
        paper="Hyperspectral Pansharpening toolbox",
        task="fuse",
        motif="SVD with its gradient, unrolled iteration, many bands",
        trap=TILED,
    ),
)

_WILDLIFE = (
    Entry(
        "wildlife",
        "wildlife",
        {"width": 64, "dim": 256, "crops": 16, "crop": 224, "species": 36, "objects": 8, "image": 1280},
        "image",
        "Detector and species classifier, ResNet-50 each; phase=classifier trains the second on the first's crops",
        image=1280,
        paper="Pytorch-Wildlife",
        task="det",
        motif="two networks in turn, data-dependent crops, topk, grid sample",
        trap=CROPS,
    ),
    Entry(
        "wildlife-tiny",
        "wildlife",
        {
            "depth1": 1,
            "depth2": 1,
            "depth3": 2,
            "depth4": 1,
            "width": 8,
            "dim": 16,
            "crops": 6,
            "crop": 32,
            "species": 5,
            "objects": 3,
            "image": 128,
        },
        "image",
        "Detector and species classifier of five bottlenecks each",
        image=128,
        small=True,
        paper="Pytorch-Wildlife",
        task="det",
        motif="two networks in turn, data-dependent crops, topk, grid sample",
        trap=CROPS,
    ),
)

_GEO = (
    Entry(
        "geo",
        "geo",
        {"depth1": 3, "depth2": 4, "depth3": 6, "depth4": 3, "width": 64, "classes": 10},
        "image",
        "ResNet-50 on the 13 bands of Sentinel-2, windows over joined rasters",
        image=224,
        paper="TorchGeo",
        task="cls",
        motif="windows warped from rasters of differing grid and resolution",
        trap=WARPED,
    ),
    Entry(
        "geo-tiny",
        "geo",
        {"depth1": 1, "depth2": 1, "depth3": 2, "depth4": 1, "width": 16, "classes": 10},
        "image",
        "ResNet of five bottlenecks on 13 bands",
        image=64,
        small=True,
        paper="TorchGeo",
        task="cls",
        motif="windows warped from rasters of differing grid and resolution",
        trap=WARPED,
    ),
)

ENTRIES = (*_KMAX, *_STRIP_MLP, *_PYRA, *_CONTEXT_SPLIT, *_PANSHARPEN, *_WILDLIFE, *_GEO)
