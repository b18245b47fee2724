"""NVIDIA's AIConfigurator on published serving rows that it can answer as well, beside our predictions of the same rows.

    python benchmarks/serve_published.py --csv FILE.csv --json OURS.json
    python benchmarks/serve_beside.py --csv FILE.csv --ours OURS.json --python AIC/bin/python [--few N] [--json OUT.json]

Answers of AIConfigurator that OUT.json has already are not asked for again.

AIC: an environment of its own with the package `aiconfigurator` (0.12 was tried: its tables come with it). Rows: whole batches at once, by its
static mode, and runs at full load, by its mode of batches in flight, at the size of batch at which it says most. Its newest tables of a
device are taken, as it does by default; published engines are older. Models are given to it by the same public sizes as to us.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SYSTEMS = {
    "H100-SXM-80GB": "h100_sxm", "H200-SXM-141GB": "h200_sxm", "B200": "b200_sxm", "GB200": "gb200", "A100-SXM-80GB": "a100_sxm", "L4": "l4",
    "L40S": "l40s", "RTX-PRO-6000": "rtx_pro_6000_server",
}  # fmt: skip
CLASSES = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
           "qwen3_moe": "Qwen3MoeForCausalLM"}  # fmt: skip
BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)
FORMATS = {"bf16": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}


def questions(path: Path, folder: Path, few: int) -> list[dict[str, Any]]:
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    from serve_published import rows_of
    from transformers import CONFIG_MAPPING

    with path.open(encoding="utf-8", newline="") as file:
        rows, _ = rows_of(list(csv.DictReader(file)))
    found = []
    for row in sorted(rows, key=lambda row: hashlib.sha256(row.id.encode()).hexdigest()):
        load = row.load.recorded
        alike = len({(one.at, one.prompt, one.output) for one in load}) == 1
        name = row.engine.name
        if not alike or row.cluster.device.name not in SYSTEMS or row.model.type not in CLASSES or name not in ("vllm", "trtllm"):
            continue
        if row.weights not in FORMATS or row.pp > 1 or "output_tok_s" not in row.published:
            continue
        kind = "static" if len(load) <= row.engine.running and row.requests <= 256 else "agg"
        where = folder / hashlib.sha256(repr((row.model.type, row.model.layers, row.model.set)).encode()).hexdigest()[:12]
        where.mkdir(exist_ok=True)
        config = CONFIG_MAPPING[row.model.type](**row.model.set, num_hidden_layers=row.model.layers, architectures=[CLASSES[row.model.type]])
        (where / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
        found.append({
            "id": row.id, "source": row.source, "kind": kind, "model": str(where), "system": SYSTEMS[row.cluster.device.name], "backend": name,
            "prompt": load[0].prompt, "output": load[0].output, "batch": len(load), "tp": row.tp, "apart": row.apart, "experts": row.model.experts,
            "format": FORMATS[row.weights], "kv": "fp8" if row.engine.kv and row.weights != "bf16" else "bfloat16",
            "devices": row.replicas * (1 if row.apart else row.tp), "published": row.published["output_tok_s"],
        })  # fmt: skip
    by: dict[str, int] = defaultdict(int)
    some = []
    for one in found:
        by[one["source"]] += 1
        if not few or by[one["source"]] <= few:
            some.append(one)
    return some


def answered() -> None:
    """In AIConfigurator's environment: questions as JSON from standard input, answers to standard output."""
    import logging

    logging.disable(logging.ERROR)
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found,unused-ignore]

    found = {}
    for one in json.load(sys.stdin):
        ranks: dict[str, int] = {"attention_dp_size": one["tp"], "moe_ep_size": one["tp"]} if one["apart"] else {"tp_size": one["tp"]}
        if one["experts"] and not one["apart"]:
            ranks["moe_tp_size"] = one["tp"]
        formats = {"gemm_quant_mode": one["format"], "kvcache_quant_mode": one["kv"]} | ({"moe_quant_mode": one["format"]} if one["experts"] else {})
        best = 0.0
        for batch in [one["batch"]] if one["kind"] == "static" else BATCHES:
            try:
                got = cli_estimate(
                    one["model"], one["system"], mode=one["kind"], backend_name=one["backend"], isl=one["prompt"], osl=one["output"],
                    batch_size=batch, **ranks, **formats,
                )  # fmt: skip
            except Exception as error:  # whatever it cannot answer
                found.setdefault(one["id"], f"{type(error).__name__}: {error}"[:200])
                continue
            if one["kind"] == "static":
                best = batch * one["output"] / (got.ttft + got.tpot * (one["output"] - 1)) * 1e3
            else:
                best = max(best, 0.0 if got.kv_cache_warning else got.tokens_per_second_per_gpu * one["devices"])
        if best:
            found[one["id"]] = best
    json.dump(found, sys.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--python", help="of AIConfigurator's environment")
    parser.add_argument("--few", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.answer:
        answered()
        return
    kept = json.loads(asked.json.read_text()) if asked.json is not None and asked.json.exists() else []
    theirs: dict[str, Any] = {one["id"]: one["aiconfigurator"] for one in kept}
    with tempfile.TemporaryDirectory() as folder:
        some = questions(asked.csv, Path(folder), asked.few)
        new = [one for one in some if one["id"] not in theirs]
        if new:
            done = subprocess.run([asked.python, __file__, "--answer"], input=json.dumps(new), capture_output=True, text=True, check=True)
            theirs |= json.loads(done.stdout[done.stdout.rindex("{") :])
    ours = {one["id"]: one["predicted"] for one in json.loads(asked.ours.read_text())["rows"] if one["quantity"] == "output_tok_s"}
    rows = [{**{name: one[name] for name in ("id", "source", "kind", "backend", "published")}, "aiconfigurator": theirs.get(one["id"], "no answer"),
             "ours": ours.get(one["id"])} for one in some]  # fmt: skip
    both = [one for one in rows if isinstance(one["aiconfigurator"], float) and one["ours"]]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in both:
        groups[one["source"], one["backend"]].append(one)
    print(f"{len(both)} of {len(some)} rows answered by both")
    for (source, backend), group in groups.items():
        told = []
        for name in ("aiconfigurator", "ours"):
            logs = [math.log(one[name] / one["published"]) for one in group]
            off, bias = statistics.median(abs(math.expm1(log)) for log in logs), math.expm1(statistics.median(logs))
            told.append(f"{name} median error {off:.1%} bias {bias:+.1%}")
        print(f"  {source[:40]:<40} {backend:<8} {len(group):>4} rows  " + "   ".join(told))
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
