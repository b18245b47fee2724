"""How the corpus draws the models that are files of its own: samples from and to, and the settings that vary."""

from __future__ import annotations

from typing import Any

from unseen_draw import Family

EITHER = {"bf16-autocast": 0.6, "fp32": 0.4}
"""Most of these models make tensors of their own, so that bf16 throughout is not for them."""


def _own(
    file: str, name: str, low: int, high: int, seq: tuple[int, ...] = (), image: tuple[int, ...] = (), autocast: bool = True, **picks: Any
) -> Family:  # fmt: skip
    path = f"benchmarks/models/{file}.py:{name}"
    return Family(model=path, batch=(low, high), seq=seq, image=image, picks=picks, precisions=EITHER, autocast=autocast)


_LOOPS = tuple(
    _own("corpus", *row, **more) for row, more in (
        (("python_lstm", 16, 256, (24, 48)), {"dim": (256, 512)}), (("independent_rnn", 16, 256, (32, 64)), {"dim": (256, 512)}),
        (("diffusion_sampler", 256, 8192), {"width": (512, 1024), "steps": (8, 16)}),
        (("neural_ode", 256, 16384), {"width": (256, 1024), "steps": (6, 10)}),
        (("equilibrium", 16, 128, (), (32, 64)), {"rounds": (12, 24)}), (("sinkhorn", 4, 32, (256, 512)), {"rounds": (10, 20)}),
        (("chain_crf", 16, 128, (32, 64)), {"dim": (256, 512)}), (("turing_machine", 16, 256, (16, 24)), {"slots": (64, 128)}),
        (("spring_simulation", 16, 256, (16, 48)), {"steps": (10, 20)}), (("kalman_filter", 32, 512, (8, 16)), {"dim": (8, 16), "autocast": False}),
        (("attention_seq2seq", 16, 128, (16, 32)), {"dim": (256, 512)}), (("spiking_net", 16, 256, (), (32, 48)), {"steps": (4, 8)}),
        (("sparse_coding", 512, 16384), {"code": (1024, 2048)}), (("world_model", 16, 256, (12, 24)), {"dim": (200, 400)}),
        (("maml", 64, 4096), {"width": (256, 1024), "steps": (3, 5)}), (("adam_inside", 256, 16384), {"dim": (128, 512)}),
        (("universal_transformer", 8, 64, (64, 256)), {"dim": (256, 512), "rounds": (8, 12)}),
    )
)  # fmt: skip
_GATHERED = tuple(
    _own("corpus2", *row, **more) for row, more in (
        (("dynamic_edges", 4, 32, (512, 1024)), {"near": (10, 20)}), (("grouped_points", 8, 64, (1024, 2048)), {"near": (16, 32)}),
        (("equivariant_graph", 1, 8), {"nodes": (2000, 6000), "dim": (64, 128)}),
        (("continuous_filters", 16, 256), {"nodes": (24, 48), "dim": (64, 128)}),
        (("relation_graph", 1, 4), {"nodes": (4000, 20_000), "dim": (64, 128)}), (("mesh_graph", 1, 8), {"nodes": (2000, 6000)}),
        (("light_graph", 1024, 16384), {"nodes": (50_000, 200_000), "dim": (32, 64)}), (("pooled_graph", 16, 256, (64, 128)), {"dim": (128, 256)}),
        (("triplet_mining", 64, 512, (), (64, 96)), {}), (("barlow_twins", 256, 4096), {"width": (2048, 4096)}),
        (("contrastive_pairs", 256, 4096), {"width": (128, 512)}), (("neighbour_memory", 64, 1024), {"entries": (20_000, 100_000)}),
        (("embedding_bags", 1024, 16384), {"tables": (4, 12), "dim": (32, 64, 128)}), (("two_towers", 1024, 8192), {"dim": (32, 64)}),
        (("user_history", 256, 4096, (50, 100)), {}), (("next_item", 64, 512, (50, 100)), {"dim": (64, 128)}),
        (("deep_and_cross", 2048, 32768), {"dim": (16, 32)}), (("knowledge_graph", 1024, 16384), {"dim": (128, 256)}),
        (("skip_gram", 4096, 65536), {"dim": (100, 300)}),
    )
)  # fmt: skip
_CONVOLVED = tuple(
    _own("corpus3", *row, **more) for row, more in (
        (("volume_unet", 1, 4, (), (48, 64, 96)), {"base": (16, 24, 32)}), (("heart_resnet", 16, 256, (2048, 4096)), {"base": (32, 64)}),
        (("voice_separation", 1, 8, (16_000, 32_000)), {"wide": (128, 256)}), (("wave_unet", 2, 16, (16_384, 65_536)), {"base": (32, 64)}),
        (("vocoder", 2, 16, (32, 64)), {"base": (256, 512)}), (("sound_codec", 2, 16, (16_384, 32_768)), {"books": (4, 8)}),
        (("noise_unet", 8, 128, (), (32, 64)), {"base": (64, 128)}), (("cycle_pair", 1, 8, (), (128, 192)), {"base": (32, 64)}),
        (("style_generator", 4, 32), {"wide": (128, 256)}), (("nhwc_resnet", 32, 256, (), (128, 192)), {}),
        (("nhwc_mobile", 32, 256, (), (128, 192)), {}),
        (("separable_net", 16, 256, (), (128, 192)), {"wide": (128, 256)}),
    )
)  # fmt: skip
_TURNED = tuple(
    _own("corpus4", *row, **more) for row, more in (
        (("window_attention", 4, 32, (512, 1024)), {"dim": (512, 768)}), (("biased_attention", 4, 48, (256, 512)), {"dim": (384, 768)}),
        (("random_features", 4, 32, (512, 1024)), {"dim": (384, 768)}), (("retention", 4, 32, (256, 512)), {"dim": (384, 768)}),
        (("block_attention", 4, 32, (512, 1024)), {"dim": (384, 768)}), (("tiny_layers", 8, 64, (32, 64)), {"layers": (16, 32)}),
        (("cross_latents", 4, 48, (1024, 4096)), {"dim": (256, 512)}), (("set_transformer", 16, 128, (250, 500)), {"dim": (128, 256)}),
        (("column_transformer", 256, 4096), {"columns": (16, 40)}), (("sparse_table", 1024, 16384), {"columns": (64, 256)}),
        (("soft_experts", 4, 32, (128, 256)), {"dim": (384, 512)}), (("capacity_experts", 4, 32, (256, 512)), {"dim": (384, 512)}),
        (("word_lstm", 16, 128, (35, 70)), {"dim": (512, 1024)}), (("speech_gru", 4, 32, (200, 600)), {"wide": (400, 800)}),
        (("text_cnn", 64, 512, (100, 300)), {}), (("time_mixer", 16, 256, (336, 512)), {}), (("basis_forecast", 512, 8192), {"wide": (256, 512)}),
        (("wide_products", 2048, 16384), {"width": (4096, 8192), "layers": (2, 4)}), (("gated_products", 1, 8, (2048,)), {"dim": (2048, 4096)}),
        (("block_products", 1024, 16384), {"size": (64, 128)}), (("hyper_network", 64, 1024, (32, 64)), {}),
    )
)  # fmt: skip
_FOUND = tuple(
    _own("corpus5", *row, **more) for row, more in (
        (("focal_detector", 4, 32, (), (256, 384)), {}),
        (("centre_points", 4, 64, (), (256, 384)), {}),
        (("optical_flow", 2, 12, (), (192, 256)), {"rounds": (4, 8)}),
        (("spatial_transformer", 64, 512, (), (48, 64)), {}),
        (("capsule_net", 32, 256), {}),
        (("conv_lstm", 4, 48, (), (64, 96)), {"wide": (32, 64)}),
        (("distilled_net", 32, 256, (), (64, 96)), {}),
        (("local_patches", 16, 128, (), (64, 96)), {}),
        (("radiance_field", 512, 4096), {"wide": (128, 256)}),
        (("hashed_field", 512, 4096), {}),
        (("heat_equation", 4096, 65536), {"wide": (128, 256), "autocast": False}),
        (("gradient_penalty", 64, 512), {}),
        (("pyg_gin", 1, 8), {"dim": (64, 128)}),
        (("pyg_sage", 1, 8), {"dim": (64, 128)}),
        (("pyg_transformer", 1, 4), {"dim": (64, 128)}),
        (("deeplab_mobile", 4, 32, (), (224, 288)), {}),
        (("fcn_resnet", 2, 16, (), (192, 256)), {}),
        (("video_r3d", 2, 16, (), (112,)), {}),
        (("video_mc3", 2, 16, (), (112,)), {}),
        (("video_swin", 1, 8, (), (112,)), {}),
    )
)  # fmt: skip
OWN: tuple[Family, ...] = (*_LOOPS, *_GATHERED, *_CONVOLVED, *_TURNED, *_FOUND)
COMPILED_OWN = tuple(
    f"benchmarks/models/{file}.py:{name}" for file, names in {
        "corpus": ("neural_ode", "sparse_coding"), "corpus2": ("barlow_twins", "deep_and_cross", "user_history"),
        "corpus3": ("separable_net", "heart_resnet", "noise_unet", "nhwc_resnet"),
        "corpus4": ("biased_attention", "retention", "time_mixer", "basis_forecast", "gated_products", "column_transformer", "text_cnn"),
    }.items() for name in names
)  # fmt: skip
