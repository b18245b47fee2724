"""Which attention kernel a call gets, as foretell says and as PyTorch on this GPU does, over drawn calls and switches.

    python benchmarks/attention_choice.py --count 4000 --out FILE

Sizes, formats, masks, dropout, strides, gradients and what is switched on (`sdpa_kernel`, its priority, `enable_*_sdp`) are drawn by
a public seed. PyTorch's own choice is read (`torch._fused_sdp_choice`), nothing is run. One row for all, with the calls that differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foretell.errors import ModelError
from foretell.trace.cuda.attention import _BACKENDS, choose

SEED = 20261118
BACKENDS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
NOTHING = "error"
SWITCHES = (
    torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.enable_math_sdp,
    torch.backends.cuda.enable_cudnn_sdp,
)  # fmt: skip


def drawn(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((1, 4, 8))
    length = draw.choice((1, 7, 64, 128, 513))
    return {
        "dtype": draw.choice(("float32", "bfloat16", "float16")), "batch": draw.choice((1, 3)), "heads": heads,
        "kv_heads": draw.choice((heads, heads, max(1, heads // 4))), "queries": length, "keys": draw.choice((length, length, 1, 77)),
        "head": draw.choice((4, 16, 20, 32, 64, 80, 96, 128, 136, 192, 256, 264)), "head_value": draw.choice((0, 0, 0, 32, 128)),
        "mask": draw.choice((None, None, None, "bool", "float", "grad")), "dropout": draw.choice((0.0, 0.0, 0.1)),
        "causal": draw.random() < 0.4, "grad": draw.random() < 0.6, "strided": draw.random() < 0.1, "dims": draw.choice((4, 4, 4, 3)),
        "how": draw.choice(("default", "kernel", "kernel", "priority", "switches")),
        "on": draw.sample(range(4), draw.randint(1, 4)),
    }  # fmt: skip


@contextlib.contextmanager
def switched(call: dict[str, Any]) -> Iterator[None]:
    some = [BACKENDS[number] for number in call["on"]]
    if call["how"] in ("kernel", "priority"):
        with sdpa_kernel(some, set_priority=call["how"] == "priority"):
            yield
        return
    if call["how"] == "switches":
        for number, switch in enumerate(SWITCHES):
            switch(number in call["on"])
    try:
        yield
    finally:
        for switch in SWITCHES:
            switch(True)


def tensors(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    dtype = getattr(torch, call["dtype"])

    def made(heads: int, length: int, width: int) -> Tensor:
        shape = (call["batch"], heads, length, width)[4 - call["dims"] :]
        found = torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device="cuda").transpose(-1, -2) if call["strided"] else (
            torch.empty(shape, dtype=dtype, device="cuda"))
        return found.requires_grad_(call["grad"])

    query = made(call["heads"], call["queries"], call["head"])
    key, value = (made(call["kv_heads"], call["keys"], width) for width in (call["head"], call["head_value"] or call["head"]))
    size = (call["queries"], call["keys"])
    mask = None
    if call["mask"] is not None and not call["causal"]:
        mask = torch.ones(size, dtype=torch.bool, device="cuda") if call["mask"] == "bool" else torch.zeros(size, dtype=dtype, device="cuda")
        mask = mask.requires_grad_(call["mask"] == "grad")
    return query, key, value, mask


def of_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: dict[str, Any]) -> str:
    try:
        number = torch._fused_sdp_choice(query, key, value, mask, call["dropout"], call["causal"], enable_gqa=call["kv_heads"] != call["heads"])
    except RuntimeError:
        return NOTHING
    return _BACKENDS.get(number, NOTHING)


def of_foretell(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: dict[str, Any]) -> str:
    gqa = call["kv_heads"] != call["heads"]
    try:
        return choose(
            query, key, value, mask, call["dropout"], call["causal"], gqa, torch.cuda.get_device_capability(), call["grad"], torch.__version__
        )
    except ModelError:
        return NOTHING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--out", default="attention_choice.jsonl")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    draw, differ = random.Random(SEED), []
    for _ in range(given.count):
        call = drawn(draw)
        made = tensors(call)
        with switched(call):
            theirs, ours = of_torch(*made, call), of_foretell(*made, call)
        if theirs != ours:
            differ.append({**call, "torch": theirs, "foretell": ours})
    row = {
        "calls": given.count, "differ": len(differ), "which": differ[:400], "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": os.environ.get("COMMIT", ""),
    }  # fmt: skip
    with Path(given.out).open("a") as out:
        out.write(json.dumps(row) + "\n")
    print(f"{len(differ)} of {given.count} calls get another kernel than foretell says")


if __name__ == "__main__":
    main()
