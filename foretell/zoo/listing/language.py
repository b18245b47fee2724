"""Language models and their fine-tuning: long contexts, memory, 4-bit bases, code, reinforcement, event sequences."""

from __future__ import annotations

from collections.abc import Mapping

from foretell.zoo.entry import Entry

Config = Mapping[str, int | float | str | bool]


def _sizes(
    module: str, *sizes: tuple[str, str, Config], domain: str = "text", paper: str, task: str, motif: str, trap: str
) -> tuple[Entry, ...]:
    """One entry for each (name, summary, config); the usual length is the config's context."""
    return tuple(
        Entry(
            name,
            module,
            config,
            domain,
            summary,
            seq=int(config["context"]) if "context" in config else None,
            small=name.endswith("-tiny"),
            paper=paper,
            task=task,
            motif=motif,
            trap=trap,
        )
        for name, summary, config in sizes
    )


_LONGLORA = _sizes(
    "longlora",
    ("longlora", "LongLoRA on Llama 2 7B, 100k tokens, rank 8", {"context": 102400}),
    (
        "longlora-tiny",
        "LongLoRA shape, 4 groups of 64 tokens, 0.5M",
        {"vocab_size": 512, "context": 256, "pretrained": 64, "layers": 2, "dim": 128, "heads": 4, "ffn": 344},
    ),
    paper="LongLoRA",
    task="lm",
    motif="grouped attention with half of the heads shifted, dense in inference; frozen half",
    trap="training and inference attend differently: dense attention at 8192 tokens costs 16 times that at 2048; only "
    "adapters, embedding and norms have states",
)

_E2LLM = _sizes(
    "e2llm",
    ("e2llm", "E2-LLM on Llama 2 7B, trained at 4k", {"context": 4096}),
    (
        "e2llm-tiny",
        "E2-LLM shape, trained at 128 tokens, 0.5M",
        {"vocab_size": 512, "context": 128, "layers": 2, "dim": 128, "heads": 4, "ffn": 344, "max_scale": 8},
    ),
    paper="E2-LLM",
    task="lm",
    motif="rotary tables with a scale and an offset drawn for every sample",
    trap="random positions change no shape, so nothing is traced or compiled again; keys and values grow with the length "
    "that the one set of weights serves",
)

_HMT = _sizes(
    "hmt",
    ("hmt", "HMT around OPT 350M's shape, 16 segments of 1024, recall of 300", {"context": 16384, "segment": 1024}),
    (
        "hmt-tiny",
        "HMT shape, 4 segments of 64, 0.5M",
        {
            "vocab_size": 512,
            "context": 256,
            "segment": 64,
            "memories": 3,
            "overlap": 8,
            "layers": 2,
            "dim": 128,
            "heads": 4,
            "recall": 64,
        },
    ),
    paper="HMT",
    task="lm",
    motif="unrolled loop over segments through one decoder; cross-attention over a memory that is kept short",
    trap="what training keeps is linear in the number of segments; in inference it is the same for any length",
)

_QLORA = _sizes(
    "qlora",
    ("qwen2-1.5b", "Qwen2 1.5B as it is, for --lora and --nf4", {"context": 512, "rank": 0}),
    ("qlora", "QLoRA of Qwen2 1.5B, NF4 base, rank 16", {"context": 512, "rank": 16}),
    (
        "qlora-tiny",
        "QLoRA of a Qwen2 shape, NF4 base, 0.5M",
        {
            "vocab_size": 512,
            "context": 128,
            "layers": 2,
            "dim": 128,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 384,
            "rank": 8,
        },
    ),
    paper="Resource-Aware Arabic LLM",
    task="lm",
    motif="4-bit weights dequantised at every use, forward and backward; frozen half",
    trap="in 4 GB it trains only with a 4-bit base and adapters, which `fit --lora --nf4` and `plan --may adapters` say",
)

_MONOCODER = _sizes(
    "monocoder",
    ("monocoder", "MonoCoder, GPT-NeoX shape for C code, 162M", {"context": 2048}),
    (
        "monocoder-tiny",
        "MonoCoder shape, 0.5M",
        {"vocab_size": 256, "context": 128, "layers": 2, "dim": 128, "heads": 4},
    ),
    paper="MonoCoder",
    task="lm",
    motif="attention and MLP side by side on one residual; a quarter of each head is rotated",
    trap="held-out perplexity of code falls with training; not handled: training on a folder of C code, CodeBLEU and "
    "generation are no part of a model",
)

_GRPO = _sizes(
    "grpo_roc",
    ("grpo_roc", "GRPO update of a 14B policy on rollouts of 12k tokens", {"context": 12288, "phase": "update"}),
    (
        "grpo_roc-tiny",
        "GRPO with resample-on-correct of a policy of 0.4M that calls a calculator",
        {
            "vocab_size": 32,
            "context": 256,
            "turns": 2,
            "group": 16,
            "layers": 2,
            "dim": 128,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 352,
        },
    ),
    paper="rStar2-Agent",
    task="rl",
    motif="generation with a cache, tool calls and resampling inside the step; phases rollout and update",
    trap="the caches of a rollout are gone before the update begins, so a step needs the larger of both and not their sum; "
    "not handled: a scheduler of rollouts and a server of concurrent tool calls are no part of a model",
)

_REPLAY = _sizes(
    "replay_seq",
    ("replay_seq", "Transformer over packed events of StarCraft II replays, 25M", {"capacity": 8192, "typical": 2000}),
    (
        "replay_seq-tiny",
        "Transformer over packed events, rows of 128, 0.1M",
        {"kinds": 64, "capacity": 128, "replays": 24, "typical": 30, "layers": 2, "dim": 64, "heads": 4},
    ),
    domain="events",
    paper="SC2EGSet",
    task="cls",
    motif="ragged sequences packed into rows, a mask by segment, averages by index_add",
    trap="replays of any length are packed so that at least 90 % of a batch is events, and its rows, not its replays, say "
    "what it costs; damaged files are left out and told of",
)

ENTRIES = (*_LONGLORA, *_E2LLM, *_HMT, *_QLORA, *_MONOCODER, *_GRPO, *_REPLAY)
