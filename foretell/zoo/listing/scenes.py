"""Points, rays, splats and meshes: clouds of a detector, radiance fields, scenes that grow."""

from __future__ import annotations

from foretell.zoo.entry import Entry

_PVD_TINY = {"features": 16, "width": 64, "depth": 4, "side": 16, "rank": 8, "levels": 4, "entries": 1024, "finest": 64}
_PVD_TRAP = "twelve conversions, and stages with graphs of their own: the teacher has no gradients and no states"
_PVD_AL_TRAP = (
    "two unlike networks in one step, twice without gradients to choose what the third pass trains on; not handled: that an MLP "
    "reaches a PSNR sooner from a hash field than from pictures, because at sizes that tests can run it does not"
)
_POLAR_MAE = (
    Entry(
        "polar_mae",
        "polar_mae",
        {"groups": 512, "points": 32, "layers": 12, "decoder_layers": 4, "dim": 384, "heads": 6, "width": 128, "masked": 0.6},
        "points",
        "PoLAr-MAE, ViT-S over 512 groups of 32 points, 29M",
        seq=4096,
        paper="PoLAr-MAE",
        task="masked",
        motif="farthest-point sampling, nearest neighbours, ragged clouds",
        trap="distances of every centre to every point: memory from 1k to 30k points per event",
    ),
    Entry(
        "polar_mae-tiny",
        "polar_mae",
        {"groups": 24, "points": 16, "layers": 2, "decoder_layers": 1, "dim": 96, "heads": 4, "width": 64, "masked": 0.6},
        "points",
        "PoLAr-MAE shape, 24 groups of 16 points",
        seq=1024,
        small=True,
        paper="PoLAr-MAE",
        task="masked",
        motif="farthest-point sampling, nearest neighbours, ragged clouds",
        trap="distances of every centre to every point: memory from 1k to 30k points per event",
    ),
)

_PVD = (
    Entry(
        "pvd",
        "pvd",
        {"teacher": "hash", "student": "mlp", "poses": 8, "rays": 512, "samples": 128, "side": 128, "rank": 48, "entries": 524_288},
        "field",
        "PVD, hash tables teach an 8-layer MLP, 4096 rays of 128 samples; the dense grid is 128 a side",
        paper="PVD (One is All)",
        task="distill",
        motif="hash tables, grids, frozen teacher, stages",
        trap=_PVD_TRAP,
    ),
    Entry(
        "pvd_al",
        "pvd",
        {"teacher": "hash", "student": "mlp", "active": True, "poses": 8, "rays": 512, "samples": 128, "entries": 524_288},
        "field",
        "PVD-AL: the same with active sampling of poses, rays and points",
        paper="PVD-AL",
        task="distill",
        motif="top-k selection between two networks, frozen teacher",
        trap=_PVD_AL_TRAP,
    ),
    Entry(
        "pvd-tiny",
        "pvd",
        {"teacher": "hash", "student": "mlp", "poses": 4, "rays": 8, "samples": 16, **_PVD_TINY},
        "field",
        "PVD shape, 64 rays of 16 samples",
        small=True,
        paper="PVD (One is All)",
        task="distill",
        motif="hash tables, grids, frozen teacher, stages",
        trap=_PVD_TRAP,
    ),
    Entry(
        "pvd_al-tiny",
        "pvd",
        {"teacher": "hash", "student": "mlp", "active": True, "poses": 4, "rays": 16, "samples": 16, **_PVD_TINY},
        "field",
        "PVD-AL shape, the hardest 32 of 64 rays of the hardest 2 of 4 poses",
        small=True,
        paper="PVD-AL",
        task="distill",
        motif="top-k selection between two networks, frozen teacher",
        trap=_PVD_AL_TRAP,
    ),
)

_PRONERF = tuple(
    Entry(
        name, "pronerf", config, "field", summary, image=image, small=small, paper="ProNeRF", task="render",
        motif="projection and grid sampling, sorts with gradients, two phases",
        trap="phases with unlike graphs: exploration has many samples and a frozen sampler, exploitation few and all trained; "
        "per-ray memory is checked here, per-ray seconds belong to a check with a clock",
    )
    for name, config, summary, image, small in (
        ("pronerf", {"rays": 4096, "samples": 8, "explored": 64, "views": 4, "width": 256, "depth": 8, "sampler_depth": 6},
         "ProNeRF, 4096 rays, 8 samples of 4 reference views", 504, False),
        ("pronerf-tiny", {"rays": 128, "samples": 4, "explored": 16, "views": 3, "width": 64, "depth": 3, "sampler_depth": 2},
         "ProNeRF shape, 128 rays of 4 samples", 32, True),
    )
)  # fmt: skip

_SPLATNET = tuple(
    Entry(
        name, "splatnet", config, "field", summary, image=image, small=small, paper="Splat the Net", task="render",
        motif="depth sort, top-k per tile, gather and scatter of primitives, integral in closed form",
        trap="how many primitives a tile meets depends on the data (a bound says it); sort and scatter are priced as measured "
        "rows of their kind, not by FLOPs, which are 0 for a sort",
    )
    for name, config, summary, image, small in (
        ("splatnet", {"primitives": 30_000, "hidden": 8, "tile": 16, "capacity": 128},
         "Splat the Net, 30k primitives of 8 hidden units; its count is from the abstract's tenth of a usual scene", 512, False),
        ("splatnet-tiny", {"primitives": 128, "hidden": 4, "tile": 8, "capacity": 16},
         "Splat the Net shape, 128 primitives, 16 a tile", 32, True),
    )
)  # fmt: skip

_SCENES: tuple[tuple[str, dict[str, int | float | str | bool], str, int, bool], ...] = (
    ("scenesplat", {"dim": 32, "depths": "2,2,2,6,2", "up_depth": 2, "patch": 1024, "language": 768},
     "SceneSplat, five levels, 100k Gaussians a scene", 100_000, False),
    ("scenesplat-tiny", {"dim": 16, "depths": "2,1", "up_depth": 1, "head_dim": 8, "patch": 64, "language": 64},
     "SceneSplat shape, two levels, 500 Gaussians a scene", 500, True),
)  # fmt: skip
_SCENESPLAT = tuple(
    Entry(
        name, "scenesplat", config, "points", summary, seq=seq, small=small, paper="SceneSplat", task="seg",
        motif="space-filling curve, sort, attention in patches, scatter maximum, two phases",
        trap="a sort decides who attends to whom, and how many cells a pooling leaves depends on the data (a bound says it); "
        "memory over ten times the scene",
    )
    for name, config, summary, seq, small in _SCENES
)  # fmt: skip

_DNMP = tuple(
    Entry(
        name, "dnmp", config, "field", summary, small=small, paper="DNMP (Urban Radiance Field)", task="render",
        motif="rasteriser with integer indices, latent-decoded meshes, frozen decoder",
        trap="raster indices have no gradient while what they pick has; bytes per 1k pixels are checked here, "
        "seconds per 1k pixels belong to a check with a clock",
    )
    for name, config, summary, small in (
        ("dnmp", {"primitives": 20_000, "level": 2, "width": 64, "depth": 4, "rays": 1024, "near": 8, "layers": 4},
         "DNMP, 20k primitives of 66 vertices, 1024 pixels", False),
        ("dnmp-tiny", {"primitives": 64, "level": 1, "width": 32, "depth": 2, "rays": 64, "near": 4, "layers": 3},
         "DNMP shape, 64 primitives of 18 vertices, 64 pixels", True),
    )
)  # fmt: skip

_ICONTROL3D = tuple(
    Entry(
        name, "icontrol3d", config, "field", summary, small=small, paper="iControl3D", task="gen",
        motif="buffers that grow, depth buffer by scatter minimum, frozen stubs, environment map",
        trap="scene buffers grow with every view: a plan for one number of views is not one for the next; each number is "
        "traced anew; not handled: growth within one run of a plan, because a trace has one shape of each buffer",
    )
    for name, config, summary, small in (
        ("icontrol3d", {"views": 10, "side": 512, "rays": 4096, "samples": 64, "width": 256, "depth": 8},
         "iControl3D, the tenth view of 512 pixels a side, inpainter stubbed", False),
        ("icontrol3d-tiny", {"views": 3, "side": 32, "rays": 64, "samples": 16, "width": 32, "depth": 3, "stub": 8},
         "iControl3D shape, the third view of 32 pixels a side", True),
    )
)  # fmt: skip

ENTRIES = (*_POLAR_MAE, *_PVD, *_PRONERF, *_SPLATNET, *_SCENESPLAT, *_DNMP, *_ICONTROL3D)
