"""Serving"""

from __future__ import annotations

import argparse
import codecs
import hashlib
import json
import math
import queue
import signal
import struct
import threading
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from foretell.eject.pieces.model import build_model

NAME = "model"
PAGES = 1024
PAGE = 16
RUNNING = 64
TOKENS = 512
SEED = 0
KNOWN = {"model", "prompt", "max_tokens", "temperature", "top_k", "top_p", "seed", "stream", "ignore_eos", "stream_options", "n", "user"}


class Asked:
    """One request: its tokens, how many of them are computed, and the pages that their keys and values are in."""

    def __init__(self, prompt: list[int], given: dict[str, Any]) -> None:
        self.tokens, self.prompt = list(prompt), len(prompt)
        self.most = int(given.get("max_tokens") or 16)
        self.temperature = float(1.0 if given.get("temperature") is None else given["temperature"])
        self.top_k, self.top_p = int(given.get("top_k") or 0), float(1.0 if given.get("top_p") is None else given["top_p"])
        self.seed = int(given.get("seed") or 0)
        self.computed, self.pages = 0, list[int]()
        self.told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.gone = False


class PagedAttention(TorchFunctionMode):
    """Takes the place of causal attention: keys and values go to their pages, and each sequence sees its own alone."""

    def __init__(self, engine: Batcher, rows: list[tuple[Asked, int]]) -> None:
        super().__init__()
        self.engine, self.layer, self.rows = engine, 0, list[tuple[int, int, Tensor]]()
        first = 0
        for one, count in rows:
            places = torch.arange(one.computed + count)
            slots = (torch.tensor(one.pages)[places // PAGE] * PAGE + places % PAGE).to(engine.device)
            self.rows.append((first, count, slots))
            first += count
        self.written = torch.cat([slots[len(slots) - count :] for _, count, slots in self.rows])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        scale = (kwargs or {}).get("scale")
        keys, values = self.engine.pool(self.layer, key, value)
        self.layer += 1
        keys[self.written], values[self.written] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        found = []
        for first, count, slots in self.rows:
            q = query[:, :, first : first + count]
            k, v = keys[slots].transpose(0, 1)[None], values[slots].transpose(0, 1)[None]
            places = torch.arange(len(slots), device=q.device)
            mask = None if count == 1 else places[None] <= places[len(slots) - count :, None]
            found.append(func(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]))
        return torch.cat(found, dim=2)


class Batcher:
    """Every step: the next token of each sequence that generates, then prompts in pieces, up to TOKENS of both."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model.eval().to(device), device
        self.words = next(one for one in model.modules() if isinstance(one, nn.Embedding)).num_embeddings
        self.longest = min(PAGES * PAGE, getattr(model, "context", PAGES * PAGE))
        self.free = list(range(PAGES))
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.coming: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self.waiting: deque[Asked] = deque()
        self.running: list[Asked] = []

    def pool(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, all pages."""
        if layer == len(self.layers):
            keys, values = (one.new_zeros(PAGES * PAGE, one.shape[1], one.shape[3]) for one in (key, value))
            self.layers.append((keys, values))
        return self.layers[layer]

    def run(self) -> None:
        while True:
            if not self.running and not self.waiting and not self.take(self.coming.get()):
                return
            while not self.coming.empty():
                self.take(self.coming.get())
            rows = self.choose()
            if rows:
                self.compute(rows)

    def take(self, one: Asked | None) -> bool:
        if one is not None:
            self.waiting.append(one)
        return one is not None

    def choose(self) -> list[tuple[Asked, int]]:
        for one in [*self.running, *self.waiting]:
            if one.gone:
                self.end(one)
        rows, left = list[tuple[Asked, int]](), TOKENS
        for one in list(self.running):
            if len(one.tokens) - one.computed == 1 and one in self.running and self.grown(one):
                rows.append((one, 1))
                left -= 1
        for one in self.running:
            lacking = len(one.tokens) - one.computed
            if lacking > 1 and left:
                rows.append((one, min(lacking, left)))
                left -= rows[-1][1]
        while self.waiting and left and len(self.running) < RUNNING and math.ceil(len(self.waiting[0].tokens) / PAGE) <= len(self.free):
            one = self.waiting.popleft()
            one.pages = [self.free.pop() for _ in range(math.ceil(len(one.tokens) / PAGE))]
            self.running.append(one)
            rows.append((one, min(len(one.tokens), left)))
            left -= rows[-1][1]
        return rows

    def grown(self, one: Asked) -> bool:
        """A page for its next token; where none is free the youngest gives up its own, and is computed anew later."""
        while len(one.pages) * PAGE <= one.computed:
            if self.free:
                one.pages.append(self.free.pop())
                continue
            youngest = self.running.pop()
            self.free += youngest.pages
            youngest.pages, youngest.computed = [], 0
            self.waiting.appendleft(youngest)
            if youngest is one:
                return False
        return True

    def end(self, one: Asked) -> None:
        (self.running if one in self.running else self.waiting).remove(one)
        self.free += one.pages
        one.pages = []
        one.told.put(None)

    @torch.no_grad()
    def compute(self, rows: list[tuple[Asked, int]]) -> None:
        """One forward of all rows, packed one after the other."""
        tokens = [token for one, count in rows for token in one.tokens[one.computed : one.computed + count]]
        positions = [place for one, count in rows for place in range(one.computed, one.computed + count)]
        ends = torch.tensor([count for _, count in rows]).cumsum(0) - 1
        with PagedAttention(self, rows):
            given, places = (torch.tensor([one], device=self.device) for one in (tokens, positions))
            logits = self.model(given, positions=places, keep=ends.to(self.device))[0]
        for (one, count), scores in zip(rows, logits, strict=True):
            one.computed += count
            if one.computed == len(one.tokens):
                one.tokens.append(chosen(scores, one))
                one.told.put(one.tokens[-1])
                if len(one.tokens) - one.prompt >= one.most:
                    self.end(one)


def chosen(logits: Tensor, one: Asked) -> int:
    """The likeliest token, or one drawn by the request's seed and the token's place."""
    if not one.temperature:
        return int(logits.argmax())
    values, order = (logits.float() / one.temperature).sort(descending=True, stable=True)
    shares = values.softmax(-1)
    gone = (shares.cumsum(-1) - shares) >= one.top_p
    if one.top_k:
        gone[one.top_k :] = True
    shares = shares.masked_fill(gone, 0.0)
    digest = hashlib.sha256(f"{one.seed}:{len(one.tokens) - one.prompt}".encode()).digest()
    point = int.from_bytes(digest[:7], "big") / 2**56 * float(shares.sum())
    place = int((shares.cumsum(-1) <= point).sum())
    return int(order[min(place, int((~gone).sum()) - 1)])


class Handler(BaseHTTPRequestHandler):
    """OpenAI's completions; each byte of a text is a token."""

    protocol_version = "HTTP/1.1"
    engine: Batcher

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        known: dict[str, Any] = {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": [{"id": NAME, "object": "model"}]}}
        self.answer(200 if self.path in known else 404, known.get(self.path, {"error": {"message": f"there is no {self.path}"}}))

    def do_POST(self) -> None:
        try:
            given = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            one = self.asked(given)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.answer(400, {"error": {"message": f"{type(error).__name__}: {error}", "type": "invalid_request_error"}})
            return
        self.engine.coming.put(one)
        if given.get("stream"):
            self.stream(one)
            return
        text = "".join(texts_of(one))
        usage = {"prompt_tokens": one.prompt, "completion_tokens": one.most, "total_tokens": one.prompt + one.most}
        self.answer(200, {"object": "text_completion", "model": NAME, "choices": [piece_of(text, "length")], "usage": usage})

    def asked(self, given: dict[str, Any]) -> Asked:
        strange = sorted(set(given) - KNOWN)
        if self.path != "/v1/completions" or strange or given.get("n") not in (None, 1):
            raise ValueError(f"only /v1/completions, one answer each, without {', '.join(strange) or 'more'}")
        prompt = given["prompt"]
        tokens = list(prompt.encode()) if isinstance(prompt, str) else [int(token) for token in prompt]
        one = Asked(tokens, given)
        if not tokens or not all(0 <= token < self.engine.words for token in tokens):
            raise ValueError(f"a prompt needs tokens from 0 to {self.engine.words - 1}")
        if one.most < 1 or one.prompt + one.most > self.engine.longest:
            raise ValueError(f"{one.prompt} tokens of prompt and {one.most} of answer; there is room for {self.engine.longest}")
        if not (0 <= one.temperature < math.inf and 0 < one.top_p <= 1 and one.top_k >= 0):
            raise ValueError("temperature from 0, top_p above 0 up to 1, top_k from 0")
        return one

    def stream(self, one: Asked) -> None:
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for text in texts_of(one):
                self.wfile.write(b"data: " + json.dumps({"choices": [piece_of(text, None)]}).encode() + b"\n\n")
                self.wfile.flush()
            last = json.dumps({"choices": [piece_of("", "length")]})
            self.wfile.write(f"data: {last}\n\ndata: [DONE]\n\n".encode())
        except OSError:
            one.gone = True  # its pages are free in the next step
        self.close_connection = True

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Waits for its answers before it closes."""

    daemon_threads = False
    request_queue_size = 1024


def texts_of(one: Asked) -> Iterator[str]:
    """Text as it comes; a character of several bytes when its last one is there."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in iter(one.told.get, None):
        if text := decoder.decode(bytes([token])) if token < 256 else "\ufffd":
            yield text
    if text := decoder.decode(b"", True):
        yield text


def piece_of(text: str, ended: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": ended, "logprobs": None}


def load_weights(model: nn.Module, path: Path) -> None:
    """From a safetensors file that has the model's own names."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    state = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            first, last = (8 + size + place for place in entry["data_offsets"])
            state[name] = torch.frombuffer(bytearray(raw[first:last]), dtype=kinds[entry["dtype"]]).reshape(entry["shape"])
    lost = [name for name, _ in model.named_parameters() if name not in state]
    if lost:
        raise SystemExit(f"{path} lacks {', '.join(lost[:3])}")
    model.load_state_dict(state, strict=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a safetensors file; without it they are random numbers")
    parser.add_argument("--host", default="127.0.0.1", help="there is no password: leave it to this machine")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    model = build_model()
    if options.weights:
        load_weights(model, options.weights)
    device = torch.device(options.device)
    Handler.engine = Batcher(model.to(torch.float32 if device.type == "cpu" else torch.bfloat16), device)
    thread = threading.Thread(target=Handler.engine.run)
    server = Server((options.host, options.port), Handler)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    thread.start()
    print(f"ready at http://{options.host}:{server.server_address[1]}/v1", flush=True)
    server.serve_forever()
    server.server_close()  # after the answers under way
    Handler.engine.coming.put(None)
    thread.join()


if __name__ == "__main__":
    main()
