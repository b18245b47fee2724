"""`foretell tune search` on ops of a training step: what it finds in five minutes each, beside every baseline.

    python benchmarks/kernel_search.py                          all tasks on the GPU at hand; a row each into results/kernel_search.jsonl
    python benchmarks/kernel_search.py --only rmsnorm-8192      some of them
    python benchmarks/kernel_search.py --device cpu --small     does it work at all

A task that has a row of this device, torch and commit is passed over, so that an interrupted run is resumed by the same command; the
search itself resumes as well. Forward and backward are timed together, in bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
OUT = HERE / "results" / "kernel_search.jsonl"
_HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\nclass Model(nn.Module):\n"
_NORM = """    def __init__(self, width):
        super().__init__()
        self.norm = nn.{kind}(width, eps=1e-5, dtype=torch.{dtype})

    def forward(self, x{more}):
        {body}
"""
_RMS = _NORM.format(kind="RMSNorm", dtype="{dtype}", more="", body="return self.norm(x)")
_LAYER = _NORM.format(kind="LayerNorm", dtype="{dtype}", more="", body="return self.norm(x)")
_ADD = _NORM.format(kind="RMSNorm", dtype="{dtype}", more=", y", body="total = x + y\n        return self.norm(total), total")
_SWIGLU = "    def forward(self, x, y):\n        return F.silu(x) * y\n"
_GEGLU = "    def forward(self, x, y):\n        return F.gelu(x) * y\n"
_SOFTMAX = "    def forward(self, x):\n        return torch.softmax(x, -1)\n"
TASKS: dict[str, tuple[str, int, int, int]] = {
    "rmsnorm-4096": (_RMS, 1, 16384, 4096), "rmsnorm-8192": (_RMS, 1, 16384, 8192), "layernorm-4096": (_LAYER, 1, 16384, 4096),
    "layernorm-8192": (_LAYER, 1, 16384, 8192), "add-rmsnorm-4096": (_ADD, 2, 16384, 4096), "swiglu-14336": (_SWIGLU, 2, 16384, 14336),
    "geglu-14336": (_GEGLU, 2, 16384, 14336), "softmax-8192": (_SOFTMAX, 1, 8192, 8192),
}  # fmt: skip
"""Name → body, inputs, rows, width."""


def text_of(name: str, *, small: bool, dtype: str) -> str:
    body, inputs, rows, width = TASKS[name]
    rows, width = (64, 256) if small else (rows, width)
    made = ", ".join([f"torch.randn({rows}, {width}, dtype=torch.{dtype})"] * inputs)
    arguments = f"\n\ndef get_init_inputs():\n    return [{width}]\n" if "__init__" in body else ""
    return f"{_HEAD}{body.replace('{dtype}', dtype)}\n\ndef get_inputs():\n    return [{made}]\n{arguments}"


def row_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from foretell.api.kernels.search import search_kernel

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name.replace('-', '_')}.py"
        path.write_text(text_of(name, small=arguments.small, dtype="float32" if arguments.device == "cpu" else "bfloat16"))
        begun = time.monotonic()
        found = search_kernel(
            str(path), minutes=arguments.minutes, out=folder, device=arguments.device, compile=not arguments.no_compile, most=arguments.most,
            progress=lambda doing: print(f"  {time.monotonic() - begun:6.0f} s  {doing}", flush=True),
        )  # fmt: skip
    told = found.to_json()
    search = told.pop("search")
    return {
        "task": name, "small": arguments.small, "seconds": round(time.monotonic() - begun, 1), "faster": found.faster, "config": search["config"],
        "tried": len(search["rows"]), "configurations": search["configurations"], "speed": search["speed"], "kept": search["kept"],
        "refused": search["verdict"]["reason"] if search["verdict"] else "", "best": search["rows"][:5], "notes": search["notes"], "text": found.text,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TASK", help=f"one of {', '.join(TASKS)}")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    from memory import machine

    about = {**machine(), "date": date.today().isoformat()}
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    same = [name for name in ("device", "torch", "commit") if name in about]
    done = {row["task"] for row in rows if all(row.get(name) == about[name] for name in same) and row["small"] == arguments.small}
    for name in arguments.only or TASKS:
        if name in done:
            print(f"{name}: there is a row")
            continue
        print(name, flush=True)
        row = {**row_of(name, arguments), **about}
        with arguments.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        word = row["speed"]["reason"] if row["speed"] else row["refused"] or "from before"
        print(f"{name}: {'faster' if row['faster'] else 'NOT faster'}: {word}; {row['tried']} of {row['configurations']} tried in {row['seconds']} s")


if __name__ == "__main__":
    main()
