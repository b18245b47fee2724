"""Models that generate: proteins, images, videos, showers, hands and detector responses."""

from __future__ import annotations

from typing import Any

from foretell.zoo.entry import Entry

_PROTEIN_SID_SAYS: dict[str, Any] = {
    "paper": "Distilled Protein Backbone",
    "task": "gen",
    "motif": "pair bias, three networks trained in turn",
    "trap": "all three networks live on the device while one is trained; 16 steps of the generator against 400 of the teacher",
}
_PROTEIN_SID = (
    Entry(
        "protein-sid",
        "protein_sid",
        {"layers": 15, "dim": 768, "pair_dim": 512, "heads": 12, "folds": 1500, "residues": 256},
        "points",
        "Three Proteína-shaped flow networks without triangle layers, 171M each",
        seq=256,
        **_PROTEIN_SID_SAYS,
    ),
    Entry(
        "protein-sid-tiny",
        "protein_sid",
        {"layers": 2, "dim": 64, "pair_dim": 32, "heads": 4, "folds": 10, "residues": 64},
        "points",
        "Three flow networks with pair bias on 64 residues, 0.2M each",
        seq=64,
        small=True,
        **_PROTEIN_SID_SAYS,
    ),
)

_DIT_REGIONAL_SAYS: dict[str, Any] = {
    "paper": "3DIS-FLUX",
    "task": "gen",
    "motif": "joint attention, masks made from boxes inside the graph",
    "trap": "masks change by step yet one graph serves all; instances stay apart; not handled: attention is priced dense, not at "
    "mask density, since the kernels behind scaled_dot_product_attention compute masked scores too",
}
_DIT_REGIONAL = (
    Entry(
        "dit-regional",
        "dit_regional",
        {
            "double": 19, "single": 38, "dim": 3072, "heads": 24, "text_dim": 4096, "pooled_dim": 768, "channels": 16,
            "instances": 6, "tokens": 64, "image": 128, "patch": 2,
        },
        "image",
        "FLUX.1-Depth shape with regional masks on 128x128 latents, 12B",
        image=128,
        **_DIT_REGIONAL_SAYS,
    ),
    Entry(
        "dit-regional-tiny",
        "dit_regional",
        {
            "double": 2, "single": 2, "dim": 64, "heads": 4, "text_dim": 32, "pooled_dim": 16, "channels": 4, "instances": 3,
            "tokens": 8, "image": 32, "patch": 2,
        },
        "image",
        "Joint-attention DiT with regional masks on 32x32 latents, 0.4M",
        image=32,
        small=True,
        **_DIT_REGIONAL_SAYS,
    ),
)

_ASD_SAYS: dict[str, Any] = {
    "paper": "Any-Size-Diffusion",
    "task": "gen",
    "motif": "buckets of several ratios, shifted tiles updated in place",
    "trap": "beside the picture itself, enlarging by tiles holds one tile however large the output; attention of the whole "
    "picture at once grows with the fourth power of its side",
}
_ASD = (
    Entry(
        "asd",
        "asd",
        {"channels": 4, "width": 320, "levels": 4, "blocks": 2, "text_dim": 1024, "tokens": 77, "head": 64, "image": 64, "tile": 64},
        "image",
        "Stable Diffusion 2.1 shape on latents of several ratios, 0.84B",
        image=64,
        **_ASD_SAYS,
    ),
    Entry(
        "asd-tiny",
        "asd",
        {"channels": 4, "width": 16, "levels": 2, "blocks": 1, "text_dim": 32, "tokens": 8, "head": 8, "image": 32, "tile": 16},
        "image",
        "Latent U-Net of two levels on latents of several ratios, 0.2M",
        image=32,
        small=True,
        **_ASD_SAYS,
    ),
)

_HUMMINGBIRD_SAYS: dict[str, Any] = {
    "paper": "AMD-Hummingbird",
    "task": "gen",
    "motif": "attention within frames and along time, a pruned sibling, feedback through frozen networks",
    "trap": "memory follows the number of frames; what the pruned network will cost is known from the full one before pruning",
}
_HUMMINGBIRD = (
    Entry(
        "hummingbird",
        "hummingbird",
        {
            "channels": 4, "width": 320, "levels": 4, "blocks": 4, "text_dim": 1024, "tokens": 77, "head": 64, "frames": 26,
            "image": 40, "reward_width": 256,
        },
        "video",
        "VideoCrafter2 shape, 1.3B, and its pruned sibling, 0.7B, on 26 frames of 40x40 latents",
        seq=26,
        image=40,
        **_HUMMINGBIRD_SAYS,
    ),
    Entry(
        "hummingbird-tiny",
        "hummingbird",
        {
            "channels": 4, "width": 16, "levels": 2, "blocks": 2, "text_dim": 32, "tokens": 8, "head": 8, "frames": 4, "image": 16,
            "reward_width": 16,
        },
        "video",
        "Video U-Net of two levels on 4 frames, and its pruned sibling",
        seq=4,
        image=16,
        small=True,
        **_HUMMINGBIRD_SAYS,
    ),
)

_ALLSHOWERS_SAYS: dict[str, Any] = {
    "paper": "AllShowers",
    "task": "gen",
    "motif": "ragged point clouds, attention masked by layer, sort, ODE sampler",
    "trap": "the ODE sampler is one graph repeated; computed on windows of layers, attention is priced at mask density; not "
    "handled: under a dense mask it is priced dense, since the kernels behind scaled_dot_product_attention compute masked scores too",
}
_ALLSHOWERS = (
    Entry(
        "allshowers",
        "allshowers",
        {"depth": 8, "dim": 256, "heads": 8, "layers": 78, "slots": 80, "reach": 1},
        "points",
        "Flow matching on up to 6,240 points in 78 layers; width and depth assumed",
        seq=6240,
        **_ALLSHOWERS_SAYS,
    ),
    Entry(
        "allshowers-tiny",
        "allshowers",
        {"depth": 2, "dim": 32, "heads": 4, "layers": 16, "slots": 16, "reach": 1},
        "points",
        "Flow matching on up to 256 points in 16 layers",
        seq=256,
        small=True,
        **_ALLSHOWERS_SAYS,
    ),
)

_INTERPRIOR_SAYS: dict[str, Any] = {
    "paper": "InterPrior",
    "task": "pose",
    "motif": "drawn codes, frozen prior, heatmaps with top-k neighbours, kinematic chain",
    "trap": "noise drawn in a block is the same noise when the block is computed again; not checked: the same under tensor "
    "parallelism, which needs several ranks",
}
_INTERPRIOR = (
    Entry(
        "interprior",
        "interprior",
        {
            "prior_dim": 512, "prior_depth": 4, "code": 128, "width": 64, "stages": 5, "dim": 768, "depth": 12, "heads": 12,
            "image": 256,
        },
        "image",
        "Prior of two hands and a ViT that links images to it; sizes assumed",
        image=256,
        **_INTERPRIOR_SAYS,
    ),
    Entry(
        "interprior-tiny",
        "interprior",
        {
            "prior_dim": 128, "prior_depth": 2, "code": 16, "width": 16, "stages": 3, "dim": 64, "depth": 2, "heads": 4,
            "image": 64, "poses": 64,
        },
        "image",
        "Prior of two hands, 0.4M, and a link of two blocks on 64x64 images",
        image=64,
        small=True,
        **_INTERPRIOR_SAYS,
    ),
)

_LAMARR_SAYS: dict[str, Any] = {
    "paper": "Lamarr",
    "task": "gen",
    "motif": "chain of conditional generators, boosted trees as gathers, five pairs of networks trained in turn",
    "trap": "trees are buffers without gradients or states; modules swap singly; events per second and joules per event are "
    "predicted; not handled: there is no `export c` that would compile the chain to a library, and no `report --validate` "
    "that would compare distributions",
}
_LAMARR = (
    Entry(
        "lamarr",
        "lamarr",
        {"width": 128, "depth": 5, "noise": 64, "trees": 300, "tree_depth": 6, "particles": 256},
        "table",
        "Five generators and three forests on events of up to 256 particles; widths assumed",
        seq=256,
        **_LAMARR_SAYS,
    ),
    Entry(
        "lamarr-tiny",
        "lamarr",
        {"width": 48, "depth": 2, "noise": 16, "trees": 20, "tree_depth": 4, "particles": 128},
        "table",
        "Five generators and three forests on events of up to 128 particles",
        seq=128,
        small=True,
        **_LAMARR_SAYS,
    ),
)

ENTRIES = (*_PROTEIN_SID, *_DIT_REGIONAL, *_ASD, *_HUMMINGBIRD, *_ALLSHOWERS, *_INTERPRIOR, *_LAMARR)
