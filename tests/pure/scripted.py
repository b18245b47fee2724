"""A model that answers by what its prompt says, so that what a way of working adds to the prompt is what makes the difference.

    strategy   told one step it writes that step; told none it writes all at once, and wrongly
    judge      told that rows can be done together it does; told nothing it stays with a loop
    gym        told that a pass-through counts nothing it writes a kernel; else it is content with the pass-through
    memory     shown a kernel for a like module it writes one at once; else it needs three tries
    ranked     shown two kernels it combines them; shown one it tries the other
    audit      it cheats, and writes a kernel only when the cheat was found out
    broken     it answers without code
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from foretell.tune.generate.budget import TokenPrices
from foretell.tune.generate.talk import CODER, JUDGE, STRATEGIST, ChatMessage, TextAnswer

TASK = '''"""Rows over their root mean square, one after the other."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.stack([row * torch.rsqrt(row.square().mean() + 1e-5) for row in x])


def get_inputs():
    return [torch.randn(24, 48)]
'''
PRICES = TokenPrices(per_million_in=3.0, per_million_out=15.0)
LIKE = TASK.replace("randn(24, 48)", "randn(20, 64)").replace("1e-5", "1e-4").replace("Rows over", "Other rows over")
"""A module that is alike."""
_HEAD = "import torch\nfrom torch import nn\n\n\nclass ModelNew(nn.Module):\n"


def kernel(body: str, note: str = "") -> str:
    return (f"# {note}\n" if note else "") + _HEAD + "\n".join(f"    {line}" if line else "" for line in body.splitlines()) + "\n"


def loop(epsilon: str = "1e-5") -> str:
    """Not the reference's ops, and not much faster."""
    return kernel(
        "def row(self, x):\n    return x / torch.sqrt(torch.linalg.vecdot(x, x) / x.shape[0] + EPS)\n\n"
        "def forward(self, x):\n    return torch.stack([self.row(row) for row in x])".replace("EPS", epsilon), "a loop",
    )  # fmt: skip


def halves(epsilon: str = "1e-5") -> str:
    return kernel(
        "def part(self, x):\n    return x * torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + EPS)\n\n"
        "def forward(self, x):\n    return torch.cat([self.part(some) for some in x.split(4)])".replace("EPS", epsilon), "four at a time",
    )  # fmt: skip


def whole(epsilon: str = "1e-5") -> str:
    return kernel(
        f"def forward(self, x):\n    return x * torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + {epsilon})", "all rows at once"
    )


def pairs() -> str:
    """Two rows at a time."""
    return kernel(
        "def part(self, x):\n    return x / torch.sqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + 1e-5)\n\n"
        "def forward(self, x):\n    return torch.cat([self.part(some) for some in x.split(2)])", "two at a time",
    )  # fmt: skip


def through() -> str:
    return kernel("def forward(self, x):\n    return torch.stack([row * torch.rsqrt(row.square().mean() + 1e-5) for row in x])", "as it was")


def wrong(what: str) -> str:
    """Another shape, or other values."""
    body = "x.square().mean(-1)" if what == "kind" else "x * torch.rsqrt(x.square().mean() + 1e-5)"
    return kernel(f"def forward(self, x):\n    return {body}", f"wrong {what}")


def cheat() -> str:
    """Right while it is looked at; after forty-five calls it gives what it gave before."""
    return kernel(
        "def __init__(self):\n    super().__init__()\n    self.calls = 0\n\n"
        "def row(self, x):\n    return x / torch.sqrt(torch.linalg.vecdot(x, x) / x.shape[0] + 1e-5)\n\n"
        "def forward(self, x):\n    self.calls += 1\n    if self.calls > 45:\n        return self.last.clone()\n"
        "    self.last = torch.stack([self.row(row) for row in x])\n    return self.last.clone()", "quick",
    )  # fmt: skip


def block(code: str, said: str = "") -> str:
    return f"{said}\n\n```python\n{code}```\n"


def epsilon_of(prompt: str) -> str:
    """Of the module that is asked about, which comes first."""
    found = re.search(r"mean\(\) \+ (1e-\d)", prompt)
    return found[1] if found else "1e-5"


# ---------------------------------------------------------------- answers, by scenario and role


def _strategy(role: str, prompt: str) -> str:
    if role == STRATEGIST:
        if "drop the epsilon" not in prompt:
            return "drop the epsilon"
        return "do four rows at a time" if "four at a time" not in prompt else "do all rows at once"
    step = re.search(r"Make this one change and no other: (.*)", prompt)
    if step is None:
        return block(wrong("values"), "All at once: no epsilon, no loop, one mean.")
    if "epsilon" in step[1]:
        return block(halves("0.1"), "Without the small number.")
    return block(halves() if "four" in step[1] else whole(), f"Only this: {step[1]}.")


def _judge(role: str, prompt: str) -> str:
    if role == JUDGE:
        counters = json.loads(re.search(r"Counters: (.*)", prompt)[1])  # type: ignore[index]
        return "24 sums where one would do: take all rows together." if counters["ops"].get("vdot", 0) > 1 else "Nothing holds it back."
    return block(whole() if "take all rows together" in prompt else loop())


def _gym(role: str, prompt: str) -> str:
    return block(whole() if "passthrough" in prompt else through())


def _memory(role: str, prompt: str) -> str:
    if "What worked for other modules here" in prompt or "refused by smoke, values" in prompt or "all rows at once" in prompt:
        return block(whole(epsilon_of(prompt)), "As it worked before.")
    return block(wrong("values" if "refused by smoke, kind" in prompt else "kind"), "A guess.")


def _ranked(role: str, prompt: str) -> str:
    shown = prompt.count("class ModelNew")
    if shown >= 2:
        return block(whole(), "Both ideas together.")
    return block(pairs() if "a loop" in prompt else loop(), "One idea.")


def _audit(role: str, prompt: str) -> str:
    return block(whole() if "refused by audit" in prompt else cheat())


def _broken(role: str, prompt: str) -> str:
    return "I would rather not."


SCENARIOS: dict[str, Callable[[str, str], str]] = {
    "strategy": _strategy, "judge": _judge, "gym": _gym, "memory": _memory, "ranked": _ranked, "audit": _audit, "broken": _broken,
}  # fmt: skip


def role_of(system: str) -> str:
    return STRATEGIST if system.startswith("You decide") else JUDGE if system.startswith("You judge") else CODER


class ScriptedModel:
    """A scenario as a generator in this process."""

    def __init__(self, scenario: str) -> None:
        self.scenario, self.asked = scenario, 0

    def complete(self, role: str, messages: Sequence[ChatMessage]) -> TextAnswer:
        self.asked += 1
        text = SCENARIOS[self.scenario](role, messages[-1].content)
        tokens_in, tokens_out = sum(len(one.content) for one in messages) // 4, len(text) // 4
        return TextAnswer(text=text, tokens_in=tokens_in, tokens_out=tokens_out, seconds=0.5, money=PRICES.of(tokens_in, tokens_out))


# ---------------------------------------------------------------- over HTTP


class ScriptedServer(ThreadingHTTPServer):
    """OpenAI's interface on this machine; `faults` come first: a status, or bytes instead of an answer."""

    daemon_threads = True

    def __init__(self, scenario: str, faults: Sequence[Any] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scenario, self.faults, self.requests = scenario, list(faults), []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, "headers": dict(self.headers), "body": body})
        fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, tuple):
            self._send(fault[0], json.dumps({"error": {"message": fault[1]}}).encode(), fault[2] if len(fault) > 2 else {})
        elif isinstance(fault, bytes):
            self._send(200, fault, {})
        else:
            system, user = body["messages"][0]["content"], body["messages"][-1]["content"]
            text = SCENARIOS[self.server.scenario](role_of(system), user)
            usage = {"prompt_tokens": len(system + user) // 4, "completion_tokens": len(text) // 4}
            self._send(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}).encode(), {})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(scenario: str, faults: Sequence[Any] = ()) -> Iterator[ScriptedServer]:
    with ScriptedServer(scenario, faults) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
