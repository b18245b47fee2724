# ruff: noqa: E501
"""Layers of torch_geometric and models of diffusers as a user's file would build them: `sweep_files.py:geometric_GCNConv`.

Each function returns (model, batch, loss). Graphs have 200 nodes and 1,000 edges; diffusion models two layers and narrow ones.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NODES, EDGES, IN, OUT, EDGE = 200, 1000, 16, 32, 8


class Called(nn.Module):
    """A layer, called with what the batch has, in order."""

    def __init__(self, layer: nn.Module, order: tuple[str, ...]) -> None:
        super().__init__()
        self.layer, self.order = layer, order

    def forward(self, **batch: Any) -> Any:
        named = {name.partition("=")[0]: batch[name.partition("=")[2]] for name in self.order if "=" in name}
        return self.layer(*(batch[name] for name in self.order if "=" not in name), **named)


def mean(output: Any, batch: Any) -> Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((leaf.float().mean() for leaf in leaves), torch.zeros(()))


# --- torch_geometric ---------------------------------------------------------------------------------------------------


def graph() -> dict[str, Any]:
    edges = torch.randint(0, NODES, (2, EDGES))
    return {
        "x": torch.randn(NODES, IN), "x2": torch.randn(NODES, IN), "edges": edges, "other": torch.randint(0, NODES, (2, EDGES)),
        "weight": torch.rand(EDGES), "attr": torch.randn(EDGES, EDGE), "pseudo": torch.rand(EDGES, 3), "type": torch.randint(0, 3, (EDGES,)),
        "node_type": torch.randint(0, 3, (NODES,)), "pos": torch.randn(NODES, 3), "normal": torch.randn(NODES, 3), "batch": torch.zeros(NODES).long(),
        "whole": torch.randint(0, 5, (NODES,)), "history": torch.randn(NODES, 4, IN), "four": torch.randint(0, NODES, (NODES, 4)),
    }  # fmt: skip


def _mlp(wide: int, out: int = OUT) -> nn.Module:
    return nn.Sequential(nn.Linear(wide, out), nn.ReLU(), nn.Linear(out, out))


def _geometric(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    conv = importlib.import_module("torch_geometric.nn.conv")
    made = getattr(conv, name)
    plain, weighted, with_attr = ("x", "edges"), ("x", "edges", "weight"), ("x", "edges", "attr")
    special: dict[str, Callable[[], tuple[nn.Module, tuple[str, ...]]]] = {
        "SimpleConv": lambda: (nn.ModuleList([nn.Linear(IN, IN), made()]), plain),
        "ChebConv": lambda: (made(IN, OUT, K=3), weighted),
        "GravNetConv": lambda: (made(IN, OUT, 4, 8, 6), ("x",)),
        "GatedGraphConv": lambda: (made(OUT, 2), plain),
        "AGNNConv": lambda: (nn.ModuleList([nn.Linear(IN, IN), made()]), plain),
        "GINConv": lambda: (made(_mlp(IN)), plain),
        "GINEConv": lambda: (made(_mlp(IN), edge_dim=EDGE), with_attr),
        "ARMAConv": lambda: (made(IN, OUT), weighted),
        "SSGConv": lambda: (made(IN, OUT, alpha=0.1), weighted),
        "APPNP": lambda: (nn.ModuleList([nn.Linear(IN, IN), made(K=3, alpha=0.1)]), plain),
        "LGConv": lambda: (nn.ModuleList([nn.Linear(IN, IN), made()]), plain),
        "RGCNConv": lambda: (made(IN, OUT, 3), ("x", "edges", "type")),
        "FastRGCNConv": lambda: (made(IN, OUT, 3), ("x", "edges", "type")),
        "RGATConv": lambda: (made(IN, OUT, 3), ("x", "edges", "type")),
        "SignedConv": lambda: (made(IN, OUT, first_aggr=True), ("x", "edges", "other")),
        "DNAConv": lambda: (made(IN), ("history", "edges")),
        "PointNetConv": lambda: (made(_mlp(IN + 3), _mlp(OUT)), ("x", "pos", "edges")),
        "GMMConv": lambda: (made(IN, OUT, 3, 4), ("x", "edges", "pseudo")),
        "SplineConv": lambda: (made(IN, OUT, 3, 3), ("x", "edges", "pseudo")),
        "NNConv": lambda: (made(IN, OUT, _mlp(EDGE, IN * OUT)), with_attr),
        "CGConv": lambda: (made(IN, EDGE), with_attr),
        "EdgeConv": lambda: (made(_mlp(2 * IN)), plain),
        "DynamicEdgeConv": lambda: (made(_mlp(2 * IN), 6), ("x",)),
        "XConv": lambda: (made(IN, OUT, 3, 6), ("x", "pos")),
        "PPFConv": lambda: (made(_mlp(IN + 4), _mlp(OUT)), ("x", "pos", "normal", "edges")),
        "PointTransformerConv": lambda: (made(IN, OUT), ("x", "pos", "edges")),
        "HypergraphConv": lambda: (made(IN, OUT), plain),
        "PNAConv": lambda: (made(IN, OUT, ["mean", "max"], ["identity", "amplification"], torch.ones(20).long()), plain),
        "GCN2Conv": lambda: (made(IN, 0.1), ("x", "x2", "edges")),
        "PANConv": lambda: (made(IN, OUT, 3), plain),
        "WLConv": lambda: (nn.ModuleList([nn.Linear(IN, IN), made()]), ("whole", "edges")),
        "WLConvContinuous": lambda: (nn.ModuleList([nn.Linear(IN, IN), made()]), plain),
        "FAConv": lambda: (made(IN), ("x", "x2", "edges")),
        "EGConv": lambda: (made(IN, OUT), plain),
        "PDNConv": lambda: (made(IN, OUT, EDGE, 16), with_attr),
        "HGTConv": lambda: (_Hetero(made(IN, OUT, (["a"], [("a", "to", "a")]), heads=2)), plain),
        "HANConv": lambda: (_Hetero(made(IN, OUT, (["a"], [("a", "to", "a")]), heads=2)), plain),
        "HeteroConv": lambda: (_Hetero(made({("a", "to", "a"): conv.SAGEConv(IN, OUT)})), plain),
        "HEATConv": lambda: (made(IN, OUT, 3, 3, 4, EDGE, 8, heads=2), ("x", "edges", "node_type", "type", "attr")),
        "PointGNNConv": lambda: (made(_mlp(IN, 3), _mlp(IN + 3), _mlp(OUT, IN)), ("x", "pos", "edges")),
        "GPSConv": lambda: (made(IN, conv.GINConv(_mlp(IN, IN)), heads=2), plain),
        "AntiSymmetricConv": lambda: (made(IN), plain),
        "DirGNNConv": lambda: (made(conv.SAGEConv(IN, OUT)), plain),
        "MixHopConv": lambda: (made(IN, OUT, powers=[0, 1, 2]), plain),
        "MeshCNNConv": lambda: (made(IN, OUT), ("x", "mesh")),
        "MessagePassing": lambda: (_Message(made(aggr="mean")), plain),
    }  # fmt: skip
    return special[name]() if name in special else (made(IN, OUT), plain)


class _Hetero(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        return self.layer({"a": x}, {("a", "to", "a"): edges})


class _Message(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(IN, OUT), layer

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        return self.layer.propagate(edges, x=self.first(x))


class _Chained(nn.Module):
    """A layer without weights after one that has some."""

    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, first: Tensor, *rest: Any) -> Any:
        if not first.is_floating_point():
            return self.parts[1](first, *rest).float() + self.parts[0].weight.mean()
        return self.parts[1](self.parts[0](first), *rest)


NOT_HERE = (
    "CuGraphSAGEConv", "CuGraphGATConv", "CuGraphRGCNConv", "FusedGATConv", "DynamicEdgeConv", "GravNetConv", "SplineConv", "XConv", "PANConv",
    "MessagePassing",
)  # fmt: skip
"""Need compiled packages of their own (pylibcugraph, dgNN, pyg-lib, torch-sparse); the last is the base of all others."""


def GEOMETRIC() -> list[str]:
    return [name for name in importlib.import_module("torch_geometric.nn.conv").classes if name not in NOT_HERE]


def build_geometric(name: str) -> tuple[nn.Module, dict[str, Any], Any]:
    layer, order = _geometric(name)
    batch = graph()
    if name == "MeshCNNConv":
        batch["mesh"] = torch.stack([torch.arange(NODES).repeat_interleave(4), torch.randint(0, NODES, (4 * NODES,))])
    layer = _Chained(layer) if isinstance(layer, nn.ModuleList) else layer
    return Called(layer, order), {key: batch[key] for key in order}, mean


# --- diffusers ---------------------------------------------------------------------------------------------------------

_IMAGE, _FILM = (4, 32, 32), (4, 8, 16, 16)
_UNET = {"block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 64,
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 8, "layers_per_block": 1}  # fmt: skip
_SMALL = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2}
_FLUX = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 64, "axes_dims_rope": (8, 12, 12)}
_IDS = {"img_ids": ("zeros", 256, 3), "txt_ids": ("zeros", 32, 3)}
DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": ({"block_out_channels": (32, 64), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "in_channels": 4, "out_channels": 4,
                     "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, {"sample": _IMAGE, "timestep": ()}),
    "UNet2DConditionModel": (_UNET, {"sample": _IMAGE, "timestep": (), "encoder_hidden_states": (77, 64)}),
    "UNet1DModel": ({"sample_size": 1024}, {"sample": (2, 1024), "timestep": ()}),
    "UNet3DConditionModel": ({**_UNET, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
                             {"sample": _FILM, "timestep": (), "encoder_hidden_states": (77, 64)}),
    "UNetMotionModel": ({"block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "cross_attention_dim": 64,
                         "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "num_attention_heads": 4, "motion_num_attention_heads": 4,
                         "layers_per_block": 1}, {"sample": _FILM, "timestep": (), "encoder_hidden_states": (77, 64)}),
    "UNetSpatioTemporalConditionModel": (
        {"block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), "layers_per_block": 1,
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "num_attention_heads": (4, 4), "cross_attention_dim": 64,
         "projection_class_embeddings_input_dim": 96, "addition_time_embed_dim": 32},
        {"sample": (8, 8, 16, 16), "timestep": (), "encoder_hidden_states": (1, 64), "added_time_ids": (3,)}),
    "DiTTransformer2DModel": ({**_SMALL, "norm_num_groups": 32}, {"hidden_states": (4, 32, 32), "timestep": (), "class_labels": ("whole",)}),
    "PixArtTransformer2DModel": ({**_SMALL, "cross_attention_dim": 128, "caption_channels": 64, "sample_size": 32},
                                 {"hidden_states": _IMAGE, "encoder_hidden_states": (77, 64), "timestep": ()}),
    "SD3Transformer2DModel": ({**_SMALL, "joint_attention_dim": 64, "caption_projection_dim": 128, "pooled_projection_dim": 64, "sample_size": 32},
                              {"hidden_states": (16, 32, 32), "encoder_hidden_states": (77, 64), "pooled_projections": (64,), "timestep": ()}),
    "FluxTransformer2DModel": ({**_FLUX, "pooled_projection_dim": 64}, {"hidden_states": (256, 64), "encoder_hidden_states": (32, 64),
                                                                        "pooled_projections": (64,), "timestep": (), **_IDS}),
    "BriaTransformer2DModel": ({**_FLUX}, {"hidden_states": (256, 64), "encoder_hidden_states": (32, 64), "timestep": (), **_IDS}),
    "ChromaTransformer2DModel": ({**_FLUX, "approximator_hidden_dim": 64, "approximator_layers": 2},
                                 {"hidden_states": (256, 64), "encoder_hidden_states": (32, 64), "timestep": (), **_IDS}),
    "AuraFlowTransformer2DModel": ({"num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 32, "num_attention_heads": 4,
                                    "joint_attention_dim": 64, "caption_projection_dim": 128, "sample_size": 32},
                                   {"hidden_states": _IMAGE, "encoder_hidden_states": (77, 64), "timestep": ()}),
    "CogVideoXTransformer3DModel": ({**_SMALL, "text_embed_dim": 64, "time_embed_dim": 64, "sample_width": 16, "sample_height": 16, "sample_frames": 29,
                                     "max_text_seq_length": 32}, {"hidden_states": (8, 16, 16, 16), "encoder_hidden_states": (32, 64), "timestep": ()}),
    "CogView4Transformer2DModel": ({**_SMALL, "text_embed_dim": 64, "time_embed_dim": 64, "condition_dim": 32, "rope_axes_dim": (32, 32), "sample_size": 32},
                                   {"hidden_states": (16, 32, 32), "encoder_hidden_states": (32, 64), "timestep": (), "original_size": (2,),
                                    "target_size": (2,), "crop_coords": (2,)}),
    "HunyuanVideoTransformer3DModel": ({"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "attention_head_dim": 32,
                                        "num_attention_heads": 4, "text_embed_dim": 64, "pooled_projection_dim": 64, "rope_axes_dim": (8, 12, 12),
                                        "guidance_embeds": False},
                                       {"hidden_states": (16, 4, 16, 16), "timestep": (), "encoder_hidden_states": (32, 64),
                                        "encoder_attention_mask": ("ones", 32), "pooled_projections": (64,)}),
    "LTXVideoTransformer3DModel": ({**_SMALL, "cross_attention_dim": 128, "caption_channels": 64},
                                   {"hidden_states": (256, 128), "encoder_hidden_states": (32, 64), "timestep": (), "encoder_attention_mask": ("ones", 32),
                                    "num_frames": 4, "height": 8, "width": 8}),
    "LatteTransformer3DModel": ({**_SMALL, "in_channels": 4, "patch_size": 2, "sample_size": 16, "caption_channels": 64, "cross_attention_dim": 128,
                                 "attention_bias": True, "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "video_length": 8},
                                {"hidden_states": _FILM, "timestep": (), "encoder_hidden_states": (32, 64)}),
    "Lumina2Transformer2DModel": ({"hidden_size": 96, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1,
                                   "axes_dim_rope": (16, 8, 8), "cap_feat_dim": 64, "sample_size": 32},
                                  {"hidden_states": (16, 32, 32), "timestep": (), "encoder_hidden_states": (32, 64),
                                   "encoder_attention_mask": ("bool", 32)}),
    "MochiTransformer3DModel": ({**_SMALL, "pooled_projection_dim": 64, "text_embed_dim": 64, "time_embed_dim": 64},
                                {"hidden_states": (12, 4, 16, 16), "encoder_hidden_states": (32, 64), "timestep": (), "encoder_attention_mask": ("bool", 32)}),
    "SanaTransformer2DModel": ({**_SMALL, "num_cross_attention_heads": 4, "cross_attention_head_dim": 32, "cross_attention_dim": 128, "caption_channels": 64},
                               {"hidden_states": (32, 32, 32), "encoder_hidden_states": (32, 64), "timestep": ()}),
    "WanTransformer3DModel": ({**_SMALL, "text_dim": 64, "freq_dim": 64, "ffn_dim": 256},
                              {"hidden_states": (16, 4, 16, 16), "timestep": (), "encoder_hidden_states": (32, 64)}),
    "SkyReelsV2Transformer3DModel": ({**_SMALL, "text_dim": 64, "freq_dim": 64, "ffn_dim": 256},
                                     {"hidden_states": (16, 4, 16, 16), "timestep": (), "encoder_hidden_states": (32, 64)}),
    "QwenImageTransformer2DModel": ({"num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 64,
                                     "axes_dims_rope": (8, 12, 12)},
                                    {"hidden_states": (256, 64), "encoder_hidden_states": (32, 64), "encoder_hidden_states_mask": ("ones", 32),
                                     "timestep": (), "img_shapes": [[(1, 16, 16)]]}),
    "AllegroTransformer3DModel": ({**_SMALL, "cross_attention_dim": 128, "caption_channels": 64, "sample_height": 16, "sample_width": 16, "sample_frames": 4},
                                  {"hidden_states": (4, 4, 16, 16), "encoder_hidden_states": (32, 64), "timestep": ()}),
    "Transformer2DModel": ({**_SMALL, "in_channels": 32, "cross_attention_dim": 64}, {"hidden_states": (32, 32, 32), "encoder_hidden_states": (77, 64)}),
    "TransformerTemporalModel": ({**_SMALL, "in_channels": 32}, {"hidden_states": (32, 16, 16), "num_frames": 1}),
    "PRXTransformer2DModel": ({"context_in_dim": 64, "hidden_size": 128, "num_heads": 4, "depth": 2, "mlp_ratio": 2.0, "axes_dim": [16, 16]},
                              {"hidden_states": (16, 32, 32), "timestep": (), "encoder_hidden_states": (32, 64)}),
}  # fmt: skip


def _input(given: Any) -> Any:
    if not isinstance(given, tuple):
        return given
    if given and isinstance(given[0], str):
        kind, *shape = given
        whole: dict[str, Callable[[], Tensor]] = {
            "zeros": lambda: torch.zeros(shape), "ones": lambda: torch.ones(1, *shape), "bool": lambda: torch.ones(1, *shape).bool(),
            "whole": lambda: torch.zeros(1).long(),
        }  # fmt: skip
        return whole[kind]()
    return torch.full((1,), 500) if given == () else torch.randn(1, *given)


def build_diffusers(name: str) -> tuple[nn.Module, dict[str, Any], Any]:
    settings, inputs = DIFFUSERS[name]
    model = getattr(importlib.import_module("diffusers"), name)(**settings)
    order = tuple(f"{key}={key}" for key in inputs)
    return Called(model, order), {key: _input(given) for key, given in inputs.items()}, mean


def __getattr__(name: str) -> Any:
    kind, _, which = name.partition("_")
    if kind in ("geometric", "diffusers") and which:
        return functools.partial(build_geometric if kind == "geometric" else build_diffusers, which)
    raise AttributeError(name)
