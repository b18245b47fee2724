"""The server under many connections, on a tiny model: who gets what, what is left behind, what it grows by.

    python benchmarks/serve_http.py                 1,000 at once, 300 that go away, 10,000 one after the other in crowds of 32
    python benchmarks/serve_http.py --requests 500  a short form

Appends a row to results/serve_http.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from foretell.serve.bench.client import BenchAnswer, ask, endpoint_of  # noqa: E402

RESULTS = HERE / "results" / "serve_http.jsonl"
SIZES = {"layers": 2, "dim": 64, "heads": 4, "vocab_size": 300, "context": 256}


class Server:
    """`foretell serve` as typed, on a tiny GPT."""

    def __init__(self, *more: str) -> None:
        command = [sys.executable, "-m", "foretell", "serve", "gpt2", "--port", "0", "--device", "cpu", "--json", *more]
        for name, value in SIZES.items():
            command += ["--set", f"{name}={value}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        about = json.loads("".join(iter(self.process.stdout.readline, "}\n")) + "}")["serve"]
        self.port = about["port"]
        self.where = endpoint_of(f"http://127.0.0.1:{self.port}/v1")

    @property
    def resident(self) -> int:
        """Bytes of memory that it holds."""
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024

    async def metrics(self) -> dict[str, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return {name: int(value) for name, value in re.findall(r"^foretell_(\w+) (\d+)$", text, re.MULTILINE)}

    async def idle(self) -> dict[str, int]:
        for _ in range(3000):
            found = await self.metrics()
            if not found["pages_held"] + found["waiting"] + found["running"]:
                return found
            await asyncio.sleep(0.02)
        raise SystemExit(f"pages are still held: {found}")

    def close(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


def body(number: int, tokens: int) -> dict[str, Any]:
    text = f"request {number} of many"
    return {"prompt": text, "max_tokens": tokens, "temperature": 0, "stream": bool(number % 2), "ignore_eos": True}


async def _one(where: Any, number: int, tokens: int, began: float) -> BenchAnswer:
    answer = BenchAnswer(due=0.0, prompt=1, wanted=tokens)
    await ask(where, {**body(number, tokens), "stream": True}, answer, began, 300.0)
    return answer


async def at_once(server: Server, count: int) -> dict[str, Any]:
    began = time.perf_counter()
    found = await asyncio.gather(*(_one(server.where, number, 16, began) for number in range(count)))
    seconds = time.perf_counter() - began
    await server.idle()
    kinds = Counter("answered" if one.good else "busy" if one.status == 429 else one.failed for one in found)
    return {"requests": count, "seconds": round(seconds, 2), **kinds}


async def gone(server: Server, count: int) -> dict[str, Any]:
    """Clients that ask for much and hang up after the first bytes."""
    before = await server.idle()

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        content = json.dumps({**body(1, 200), "prompt": f"gone {number}"}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
        await reader.read(20)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    await asyncio.gather(*(one(number) for number in range(count)))
    after = await server.idle()
    return {"requests": count, "cancelled": after["cancelled"] - before["cancelled"], "tokens": after["output_tokens"] - before["output_tokens"],
            "tokens_asked_for": 200 * count, "pages_held": after["pages_held"]}  # fmt: skip


async def many(server: Server, count: int, crowd: int) -> dict[str, Any]:
    """Memory after a tenth of the requests, and after all."""
    numbers, began, failed = iter(range(count)), time.perf_counter(), 0
    at: dict[int, int] = {}

    async def user() -> None:
        nonlocal failed
        for number in numbers:
            failed += not (await _one(server.where, number, 8, began)).good
            if (number + 1) % (count // 10) == 0:
                at[number + 1] = server.resident

    await asyncio.gather(*(user() for _ in range(crowd)))
    seconds = time.perf_counter() - began
    after = await server.idle()
    resident = [at[number] for number in sorted(at)]
    return {"requests": count, "failed": failed, "seconds": round(seconds, 1), "resident_bytes": resident,
            "grown_after_a_tenth_bytes": resident[-1] - resident[0], "pages_held": after["pages_held"]}  # fmt: skip


async def measured(count: int, at_a_time: int) -> dict[str, Any]:
    server = Server("--queue", str(at_a_time - 200), "--pages", "512")
    try:
        row = {"at_once": await at_once(server, at_a_time), "gone": await gone(server, 300), "many": await many(server, count, 32)}
    finally:
        status = server.close()
    return {**row, "exit_status": status}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    row = asyncio.run(measured(asked.requests, asked.at_once))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    row |= {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "torch": torch.__version__, "commit": commit.stdout.strip() or "unknown"}
    with asked.out.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
