"""Models that look at scenes and signals: bird's-eye views, small objects, detection, compression, kernels."""

from __future__ import annotations

from foretell.zoo.entry import Entry

_SPLAT = (
    "cameras share every kernel as one batch; the splat is priced by measured atomics, not FLOPs; "
    "not handled: cameras on streams or devices of their own"
)
_STAGES = (
    "recomputing the repeated stage, four tensors in and five out, must save what is said; rank and sparsity per stage come "
    "from the module's `stages_of`; not handled: reports do not print them, they know no values"
)
_TINY = "one vmapped set of kernels for thousands of networks, not a set for each: ops do not grow with patches, results do not change"
_SCAN = (
    "a scan costs its steps in a row, not its FLOPs: each step is a kernel of its own here; chunked and sequential agree; "
    "suppression stays outside of what is traced; not handled: a fused scan kernel, which plain PyTorch does not have"
)
_SPECTRUM = (
    "memory is the rows-by-centres kernel and grows with their product, not with parameters; a planted active subspace is "
    "found by the module's `spectrum`; not handled: there is no `explain --spectrum` yet"
)
_BEV = (
    Entry(
        "bev",
        "bev",
        {"cameras": 6, "frames": 3, "future": 5, "image": 224, "width": 480, "depths": 48, "grid": 200},
        "driving",
        "BEV instance prediction, six cameras of 224x480, 200x200 cells of half a metre",
        image=224,
        paper="BEV Instance Prediction",
        task="seg",
        motif="scatter",
        trap=_SPLAT,
    ),
    Entry(
        "bev-tiny",
        "bev",
        {
            "cameras": 6, "frames": 2, "future": 2, "image": 32, "width": 64, "encoder_width": 8, "encoder_depth": 2,
            "channels": 16, "depths": 12, "grid": 32, "cell": 0.5, "dim": 16, "levels": 3, "depth": 1,
        },
        "driving",
        "BEV instance prediction, six cameras of 32x64, 32x32 cells",
        image=32,
        small=True,
        paper="BEV Instance Prediction",
        task="seg",
        motif="scatter",
        trap=_SPLAT,
    ),
)  # fmt: skip

_RPCANET = (
    Entry(
        "rpcanet",
        "rpcanet",
        {"stages": 6, "channels": 1, "dim": 32, "depth": 3},
        "image",
        "RPCANet++ of six stages on 256x256 infrared images",
        image=256,
        paper="RPCANet++",
        task="seg",
        motif="unrolled loop",
        trap=_STAGES,
    ),
    Entry(
        "rpcanet-tiny",
        "rpcanet",
        {"stages": 4, "channels": 1, "dim": 8, "depth": 1},
        "image",
        "RPCANet++ of four stages on 64x64 images",
        image=64,
        small=True,
        paper="RPCANet++",
        task="seg",
        motif="unrolled loop",
        trap=_STAGES,
    ),
)

_RECOMBINER = (
    Entry(
        "recombiner",
        "recombiner",
        {"signals": 16, "image": 512, "patch": 64, "group": 4, "depth": 3, "hidden": 32, "latents": 64, "encoding": 16},
        "compression",
        "RECOMBINER, 64 patches of 64x64 for each of 16 images; sizes of latents are near the paper's",
        image=512,
        paper="RECOMBINER",
        task="compress",
        motif="many tiny models",
        trap=_TINY,
    ),
    Entry(
        "recombiner-tiny",
        "recombiner",
        {"signals": 4, "image": 128, "patch": 8, "group": 4, "depth": 2, "hidden": 16, "latents": 16, "encoding": 4},
        "compression",
        "RECOMBINER, 256 patches of 8x8 for each of four images",
        image=128,
        small=True,
        paper="RECOMBINER",
        task="compress",
        motif="many tiny models",
        trap=_TINY,
    ),
)

_MAMBA_YOLO = (
    Entry(
        "mamba_yolo",
        "mamba_yolo",
        {"dim": 32, "n1": 1, "n2": 1, "n3": 3, "n4": 1, "state": 16, "classes": 80, "objects": 64},
        "image",
        "Mamba YOLO T on 640x640, scan in plain PyTorch",
        image=640,
        paper="Mamba YOLO",
        task="det",
        motif="scan",
        trap=_SCAN,
    ),
    Entry(
        "mamba_yolo-tiny",
        "mamba_yolo",
        {"dim": 8, "n1": 1, "n2": 1, "n3": 1, "n4": 1, "state": 4, "classes": 5, "objects": 6},
        "image",
        "Mamba YOLO, one block a stage, on 64x64",
        image=64,
        small=True,
        paper="Mamba YOLO",
        task="det",
        motif="scan",
        trap=_SCAN,
    ),
)

_GAUSS_RBF = (
    Entry(
        "gauss_rbf",
        "gauss_rbf",
        {"features": 784, "centres": 1024, "outputs": 10, "task": "classes"},
        "table",
        "Gaussian RBF network for ten classes of 784 features; the numbers of centres and rows are assumed",
        seq=4096,
        paper="Gaussian RBF networks",
        task="cls",
        motif="kernel",
        trap=_SPECTRUM,
    ),
    Entry(
        "gauss_rbf-tiny",
        "gauss_rbf",
        {"features": 16, "centres": 128, "outputs": 1},
        "table",
        "Gaussian RBF network for a table of 2048 rows of 16 features",
        seq=2048,
        small=True,
        paper="Gaussian RBF networks",
        task="regress",
        motif="kernel",
        trap=_SPECTRUM,
    ),
)

ENTRIES = (*_BEV, *_RPCANET, *_RECOMBINER, *_MAMBA_YOLO, *_GAUSS_RBF)
