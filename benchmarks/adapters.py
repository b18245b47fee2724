"""LoRA as others implement it: the steps of benchmarks/memory.py with peft's adapters, and over an NF4 base.

    python benchmarks/adapters.py peft                 needs peft; the configurations of configs/memory.jsonl with `lora`
    python benchmarks/adapters.py nf4                  needs Triton; the three configurations below
    python benchmarks/adapters.py nf4 --predict-only   no GPU needed; prints, writes nothing
    python benchmarks/adapters.py nf4 --check          the kernel against the same on the CPU; without a GPU,
                                                       set TRITON_INTERPRET=1

peft: foretell's own adapters are replaced by `peft.get_peft_model` on the same layers, everything else is the same, so
that the prediction, made from our adapters, is held against those people use.

nf4: weights are unpacked by foretell's Triton kernel, which allocates nothing but the result, as bitsandbytes' does. Rows
before November 2026 are of the same kernel outside foretell, and of adapters that kept what peft's keep for backward; today's
keep less, and were not measured yet.

Rows of kind `peft` and `nf4` go to results/memory.jsonl, one by one. A configuration that is in the file already is not
measured again: to measure anew, give another file with --out. Device memory is in a row only with --alone, which says
that no other process uses the GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import cases  # noqa: E402
import memory  # noqa: E402

LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
NF4: list[dict[str, Any]] = [
    {"model": "llama3-1b"},
    {"model": "llama3-1b", "precision": "bf16"},
    {"model": "hf:llama", "overrides": LLAMA_1B, "precision": "bf16"},
]
"""All of them with a micro-batch of 2, 2048 tokens and adapters of rank 16."""

# ---------------------------------------------------------------- NF4 in one kernel


def check(device: str) -> tuple[float, float]:
    """Largest distance of a matrix unpacked by the kernel from the same on the CPU and from the matrix, in its largest value."""
    import torch

    from foretell.trace.adapters.kernel import unpack
    from foretell.trace.adapters.nf4 import CODEBOOK, nf4_dequantize, nf4_quantize, nf4_scales

    weight = torch.randn(129, 77)
    packed, scales, nested = nf4_quantize(weight, False)
    reference = nf4_dequantize(packed, scales, nested, [129, 77], torch.float32)
    ours = torch.empty(129 * 77, device=device)
    unpack(packed.to(device), nf4_scales(scales, nested).to(device), torch.tensor(CODEBOOK, device=device), ours, 4)
    largest = weight.abs().max()
    back = ours.cpu().view(129, 77)
    return float((back - reference).abs().max() / largest), float((back - weight).abs().max() / largest)


def measure_nf4(config: dict[str, Any]) -> dict[str, Any]:
    import torch

    wrong, error = check("cuda")
    if wrong > 0:
        return {"error": f"the kernel differs from the reference by {wrong}"}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {**cases.measure(config), "kernel": "foretell's, in Triton", "nf4_error": round(error, 4)}


# ---------------------------------------------------------------- peft


def adapt_with_peft(model: Any, adapters: Any, base: Any) -> None:
    import peft

    from foretell.trace.adapters.put import layers_to_adapt

    assert not base, "peft's own NF4 needs bitsandbytes"
    peft.get_peft_model(model, peft.LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=list(layers_to_adapt(model, adapters))))


def measure_peft(config: dict[str, Any]) -> dict[str, Any]:
    import peft

    import foretell.trace.record.step

    foretell.trace.record.step.adapt = adapt_with_peft
    return {**cases.measure(config), "peft": peft.__version__}


# ---------------------------------------------------------------- rows


def work(kind: str) -> dict[str, dict[str, Any]]:
    """Configurations by the key of their row."""
    if kind == "nf4":
        same = {**memory.DEFAULTS, "micro_batch": 2, "seq": 2048, "lora": 16, "nf4": True}
        return {memory.key_of(config): config for config in ({**same, **given} for given in NF4)}
    configs = memory.read_configs(HERE / "configs" / "memory.jsonl")
    return {memory.key_of(config) + " with peft": config for config in configs if config["lora"] and not config["nf4"]}


def compare(kind: str, left: dict[str, dict[str, Any]], out: Path, predict_only: bool, alone: bool) -> None:
    predicted = memory.predict_all(list(left.values())) if left else []
    about = memory.machine()
    if not predict_only:
        cases.warm_up()
    for (key, config), said in zip(left.items(), predicted, strict=True):
        if predict_only:
            print(f"{memory.name_of(config)}: {said}", flush=True)
            continue
        row: dict[str, Any] = {"key": key, "name": memory.name_of(config), "predicted": said, **about}
        answer = memory.in_child(measure_nf4 if kind == "nf4" else measure_peft, config, timeout=300)
        if not alone:
            answer.pop("device", None)
        row |= {"failed" if "error" in answer else "measured": answer, "kind": kind}
        memory.append(out, row)
        print(f"{row['name']}\n{row.get('failed') or memory.summary([row]) or said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("peft", "nf4"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "memory.jsonl")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--alone", action="store_true", help="no other process uses the GPU: keep device memory")
    parser.add_argument("--check", action="store_true", help="try the NF4 kernel and stop")
    options = parser.parse_args()
    has_gpu = memory.machine()["device"] != "no GPU"
    needed = "triton" if options.check or options.kind == "nf4" else "peft"
    if not options.predict_only and importlib.util.find_spec(needed) is None:
        sys.exit(f"{needed} is not installed; --predict-only needs neither it nor a GPU")
    if options.check:
        wrong, error = check("cuda" if has_gpu else "cpu")
        print(f"from the reference {wrong:.2g}, from the weights {error:.2g} of the largest")
        return
    if not options.predict_only and not has_gpu:
        sys.exit("there is no GPU here to measure on; --predict-only makes the predictions")
    done = set() if options.predict_only else memory.done_keys(options.out)
    left = {key: config for key, config in work(options.kind).items() if key not in done}
    compare(options.kind, left, options.out, options.predict_only, options.alone)


if __name__ == "__main__":
    main()
