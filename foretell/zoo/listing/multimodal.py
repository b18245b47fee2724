"""Models that see and read: pyramids of images, sliced images, packed sequences, retrieval beside a video."""

from __future__ import annotations

from foretell.zoo.entry import Entry

_PIIP = (
    Entry(
        "piip",
        "piip",
        {"branches": "vit-192-12-3-1120 vit-384-12-6-896 vit-768-12-12-448", "stages": 12, "width": 768, "classes": 150},
        "image",
        "PIIP-TSB: ViT-T at 1120, ViT-S at 896 and ViT-B at 448 pixels, twelve interactions",
        image=1120,
        paper="PIIP",
        task="seg",
        motif="unequal branches, deformable sampling",
        trap="branches of unequal width and resolution must be balanced: a stage holds a part of every branch, so cutting "
        "between stages balances them; its FLOPs are half of those of ViT-B at 1024 pixels",
    ),
    Entry(
        "piip-tiny",
        "piip",
        {
            "branches": "vit-16-2-2-256 vit-32-2-2-192 vit-64-2-4-128", "stages": 2, "window": 4, "reading_heads": 4,
            "width": 32, "classes": 10,
        },
        "image",
        "PIIP, three branches of two blocks, two interactions",
        image=256,
        small=True,
        paper="PIIP",
        task="seg",
        motif="unequal branches, deformable sampling",
        trap="branches of unequal width and resolution",
    ),
    Entry(
        "piip_llava",
        "piip",
        {
            "branches": "cnn-512-27-3-768 vit-1024-24-16-336", "stages": 12, "width": 4096, "layers": 32, "heads": 32,
            "ffn": 11008, "vocab_size": 32000, "context": 512,
        },
        "image",
        "PIIP-LLaVA: ConvNeXt-B at 768 and ViT-L at 336 pixels before Vicuna-7B; sides as near as known",
        seq=512,
        image=768,
        paper="PIIP-LLaVA",
        task="lm",
        motif="CNN and ViT branches, deformable sampling",
        trap="a CNN and a ViT branch and a decoder in one plan: cut between stages of both; a new resolution is "
        "predicted anew; not handled: without a new trace, since a trace has numbers for shapes and laws only in the micro-batch",
    ),
    Entry(
        "piip_llava-tiny",
        "piip",
        {
            "branches": "cnn-32-2-1-192 vit-64-2-4-128", "stages": 2, "window": 0, "reading_heads": 4, "width": 64,
            "layers": 2, "heads": 4, "ffn": 128, "vocab_size": 512, "context": 64,
        },
        "image",
        "PIIP-LLaVA, a CNN and a ViT branch before two decoder blocks",
        seq=64,
        image=192,
        small=True,
        paper="PIIP-LLaVA",
        task="lm",
        motif="CNN and ViT branches, deformable sampling",
        trap="a CNN and a ViT branch and a decoder in one plan: cut between stages of both; a new resolution is "
        "predicted anew; not handled: without a new trace, since a trace has numbers for shapes and laws only in the micro-batch",
    ),
)  # fmt: skip

_MINICPM_V = (
    Entry(
        "minicpm_v",
        "minicpm_v",
        {"width": 1344, "height": 1344, "layers": 32, "dim": 4096, "queries": 96, "context": 512},
        "image",
        "MiniCPM-Llama3-V 2.5: SoViT-400M/14 on up to nine slices of 448 pixels, 96 tokens a slice, Llama 3 8B",
        seq=512,
        paper="MiniCPM-V",
        task="lm",
        motif="ragged slices, masked perceiver, tokens put in place",
        trap="the number of slices follows from the data: width, height and a bound in the config say it, and memory is a "
        "straight line in it; not handled: a symbol for it in one trace, and a 4-bit plan with time to first token for "
        "a phone, since memory is predicted for CUDA and ROCm devices and 4-bit weights only under adapters",
    ),
    Entry(
        "minicpm_v-tiny",
        "minicpm_v",
        {
            "width": 192, "height": 128, "side": 64, "patch": 8, "most": 9, "vision_dim": 64, "vision_depth": 2,
            "vision_heads": 4, "vision_hidden": 128, "queries": 8, "layers": 2, "dim": 64, "heads": 4, "kv_heads": 2,
            "ffn": 128, "vocab_size": 512, "context": 64,
        },
        "image",
        "MiniCPM-V, two encoder and two decoder blocks, six slices",
        seq=64,
        small=True,
        paper="MiniCPM-V",
        task="lm",
        motif="ragged slices, masked perceiver, tokens put in place",
        trap="the number of slices follows from the data; memory is a straight line in it",
    ),
)  # fmt: skip

_TINYGPT_V = (
    Entry(
        "tinygpt_v",
        "tinygpt_v",
        {"image": 224, "layers": 32, "dim": 2560, "heads": 32, "rank": 64, "context": 256},
        "image",
        "TinyGPT-V: frozen EVA ViT-g and Q-Former, projections, frozen Phi-2 with adapters",
        seq=256,
        image=224,
        paper="TinyGPT-V",
        task="lm",
        motif="frozen halves, adapters, phases",
        trap="frozen parts have no gradient and no state, and what trains changes with the phase: training fits 24 GB (9.5 GB in "
        "bf16); one answer takes 9.0 GB in bf16 and 3.4 GB with a 4-bit base, so 8 GB needs quantised weights, as in the "
        "paper; not handled: `plan --infer` has no 4-bit weights, `fit --infer --lora 1 --nf4` says it",
    ),
    Entry(
        "tinygpt_v-tiny",
        "tinygpt_v",
        {
            "image": 56, "patch": 14, "vision_dim": 64, "vision_depth": 2, "vision_heads": 4, "vision_hidden": 160,
            "former_dim": 48, "former_layers": 2, "former_heads": 4, "queries": 8, "middle": 96, "vocab_size": 512,
            "context": 128, "layers": 2, "dim": 80, "heads": 4, "rank": 4,
        },
        "image",
        "TinyGPT-V, two blocks each of ViT, Q-Former and decoder",
        seq=128,
        image=56,
        small=True,
        paper="TinyGPT-V",
        task="lm",
        motif="frozen halves, adapters, phases",
        trap="frozen parts have no gradient and no state, and what trains changes with the phase",
    ),
)  # fmt: skip

_OPEN_QWEN2VL = (
    Entry(
        "open_qwen2vl",
        "open_qwen2vl",
        {"image": 384, "pooled": 12, "layers": 28, "dim": 1536, "context": 4096, "phase": "pretrain"},
        "image",
        "Open-Qwen2VL: frozen SigLIP-so400m, 144 tokens an image, Qwen2.5-1.5B, sequences packed to 4096 tokens",
        seq=4096,
        image=384,
        paper="Open-Qwen2VL",
        task="lm",
        motif="packed sequences, block mask, frozen encoder, phases",
        trap="packed sequences are at least 95 % full and no sample sees another; 5e9 tokens on eight A100-40GB are predicted to "
        "take 205 GPU-hours (30 % of peak, half of it dense masked attention) beside the published 442 (6ND implies about "
        "12 %): data loading and a real step's stalls are not in the prediction, and the A100 was never measured here",
    ),
    Entry(
        "open_qwen2vl-tiny",
        "open_qwen2vl",
        {
            "image": 56, "patch": 14, "pooled": 2, "vision_dim": 64, "vision_depth": 2, "vision_heads": 4, "layers": 2,
            "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab_size": 512, "context": 192, "shortest": 4,
            "longest": 40, "phase": "pretrain",
        },
        "image",
        "Open-Qwen2VL, two blocks each of ViT and decoder, sequences packed to 192 tokens",
        seq=192,
        image=56,
        small=True,
        paper="Open-Qwen2VL",
        task="lm",
        motif="packed sequences, block mask, frozen encoder, phases",
        trap="packed sequences are full, and no sample sees another",
    ),
)  # fmt: skip

_VIDEO_RAG = (
    Entry(
        "video_rag",
        "video_rag",
        {"frames": 64, "image": 384, "layers": 80, "dim": 8192, "kept": 32, "context": 256},
        "video",
        "Video-RAG: stubs of Whisper-large, OCR, detector and Contriever before a 72B video language model, 64 frames",
        seq=256,
        image=384,
        paper="Video-RAG",
        task="lm",
        motif="frozen tools, top-k retrieval, several encoders before one decoder",
        trap="stages of unlike work are placed over unlike devices from one trace, tools are exchanged by their interface and "
        "labelled as stubs; not handled: tools side by side (a plan is a chain), and a median latency while serving, since "
        "single requests are predicted and a split over a CPU and a GPU is planned but cannot be run",
    ),
    Entry(
        "video_rag-tiny",
        "video_rag",
        {
            "frames": 4, "image": 56, "patch": 14, "pooled": 2, "sounds": 64, "mels": 16, "words": 8, "keys": 2, "kept": 4,
            "asked": 8, "speech_dim": 32, "speech_depth": 2, "tool_dim": 32, "tool_depth": 2, "retriever_dim": 32,
            "retriever_depth": 2, "tool_head_dim": 16, "vision_dim": 64, "vision_depth": 2, "vision_heads": 4, "layers": 2,
            "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab_size": 512, "context": 96,
        },
        "video",
        "Video-RAG, two blocks each of tools, retriever, ViT and decoder",
        seq=96,
        image=56,
        small=True,
        paper="Video-RAG",
        task="lm",
        motif="frozen tools, top-k retrieval, several encoders before one decoder",
        trap="stages of unlike work over unlike devices; tools exchanged by their interface",
    ),
)  # fmt: skip

ENTRIES = (*_PIIP, *_MINICPM_V, *_TINYGPT_V, *_OPEN_QWEN2VL, *_VIDEO_RAG)
