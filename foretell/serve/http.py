"""OpenAI's HTTP interface on the standard library: completions, chat, models, health, metrics.

    client ─► _Connection ─► asked.read ─► EngineThread.submit ─► tokens ─► text ─► pieces of a stream, or one object
                                             └── a client that goes away: cancelled, its pages are free in the next step
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foretell.errors import UserError
from foretell.serve import asked
from foretell.serve.engine import STOP, Completion, TokenEvent
from foretell.serve.sampling import ChosenToken
from foretell.serve.text import AnswerText, Words
from foretell.serve.thread import FAILED, Busy, EngineThread

MOST_HEAD, MOST_BODY, MOST_HEADERS = 64 * 2**10, 8 * 2**20, 100
IDLE_SECONDS = 75.0
"""A connection that says nothing for so long is closed."""
REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal HttpServer Error", 503: "Service Unavailable",
}  # fmt: skip
PATHS = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET", "/health": "GET", "/metrics": "GET"}


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class _Refused(Exception):
    """What is said to a client instead of an answer."""

    def __init__(self, status: int, words: str, kind: str = "invalid_request_error") -> None:
        super().__init__(words)
        self.status, self.words, self.kind = status, words, kind


class _AnswerPart:
    """One of the answers of a request: its text so far, by way of a queue from the engine's thread."""

    def __init__(self, index: int, answer: AnswerText) -> None:
        self.index, self.answer = index, answer
        self.events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self.generation: Completion | None = None
        self.tokens = 0
        self.ended = ""


class HttpServer:
    """One model behind one address."""

    def __init__(self, keeper: EngineThread, words: Words, model: str) -> None:
        self.keeper, self.words, self.model = keeper, words, model
        self.began = time.time()
        self._open: set[asyncio.Task[None]] = set()

    async def serve(self, host: str, port: int, ready: Any = None) -> None:
        """Until SIGTERM or Ctrl-C: then nothing more is taken, and what is under way is answered."""
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                loop.add_signal_handler(number, stopping.set)
        try:
            server = await asyncio.start_server(self._connected, host, port, limit=MOST_HEAD, backlog=2048)
        except OSError as error:
            raise UserError(f"nothing can listen at {host}:{port}: {error.strerror or error}", "another --port, or 0 for any") from error
        if ready is not None:
            ready(server.sockets[0].getsockname()[1])
        self.stop = stopping.set

        def ended() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(stopping.set)

        self.keeper.when_ended = ended
        if not self.keeper.alive:
            stopping.set()
        await stopping.wait()
        self.keeper.drain()
        await loop.run_in_executor(None, self.keeper.join)
        server.close()
        await asyncio.sleep(0)
        for task in list(self._open):
            if not task.done():
                with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                    await asyncio.wait_for(asyncio.shield(task), 2.0)
            task.cancel()

    # ------------------------------------------------------------------ a connection

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while not writer.is_closing():
                request = await asyncio.wait_for(_read(reader), IDLE_SECONDS)
                if request is None:
                    break
                await self._answer(request, reader, writer)
                if request.headers.get("connection", "").lower() == "close" or not self.keeper.alive:
                    break
        except _Refused as refused:
            with contextlib.suppress(OSError):
                await _send(writer, refused.status, asked.problem(refused.words, refused.kind), close=True)
                writer.write_eof()
                with contextlib.suppress(TimeoutError):  # what it still sends: closed unread, the answer would be lost with it
                    await asyncio.wait_for(reader.read(MOST_HEAD), 0.5)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _answer(self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method = PATHS.get(request.path)
            if method is None:
                raise _Refused(404, f"there is no {request.path}; there are {', '.join(PATHS)}")
            if request.method != method:
                raise _Refused(405, f"{request.path} takes {method}, not {request.method}")
            if request.path == "/v1/models":
                one = {"id": self.model, "object": "model", "created": int(self.began), "owned_by": "foretell"}
                await _send(writer, 200, {"object": "list", "data": [one]})
            elif request.path == "/health":
                alive = self.keeper.alive
                await _send(writer, 200 if alive else 503, {"status": "ok" if alive else "the engine has ended"})
            elif request.path == "/metrics":
                await _send_text(writer, self._metrics())
            else:
                await self._generate(request, reader, writer)
        except _Refused as refused:
            await _send(writer, refused.status, asked.problem(refused.words, refused.kind))

    def _metrics(self) -> str:
        lines = []
        for name, value in asdict(self.keeper.counts()).items():
            kind = "gauge" if name in ("waiting", "running", "pages", "pages_held") else "counter"
            lines += [f"# TYPE foretell_{name} {kind}", f"foretell_{name} {value}"]
        return "\n".join(lines) + "\n"

    # ------------------------------------------------------------------ an answer

    async def _generate(self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chat = request.path.endswith("/chat/completions")
        longest = self.keeper.engine.longest
        try:
            wanted = asked.read(request.body, self.words, chat=chat, longest=longest, model=self.model)
            parts = await self._submitted(wanted)
        except Busy as error:
            raise _Refused(429 if self.keeper.taking else 503, f"{error.problem}; {error.remedy}", "overloaded") from error
        except UserError as error:
            raise _Refused(404 if isinstance(error, asked.OtherModel) else 400, f"{error.problem}; try: {error.remedy}") from error
        gone, close = asyncio.ensure_future(_gone(reader)), False
        work = asyncio.ensure_future(self._streamed(wanted, parts, writer) if wanted.stream else self._whole(wanted, parts, writer))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not gone.result():
                await asyncio.wait({work})
                close = True  # the beginning of its next request is lost: it asks again on a new connection
            if work.done():
                await work
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            if close or not work.done():
                writer.close()
            for part in parts:
                if not part.ended and part.generation is not None:
                    self.keeper.cancel(part.generation)

    async def _submitted(self, wanted: asked.Asked) -> list[_AnswerPart]:
        loop = asyncio.get_running_loop()
        parts: list[_AnswerPart] = []
        try:
            for prompt in wanted.prompts:
                for how in wanted.samplings:
                    part = _AnswerPart(len(parts), AnswerText(self.words.decoder(), wanted.stops))

                    def listen(event: TokenEvent, part: _AnswerPart = part) -> None:
                        with contextlib.suppress(RuntimeError):  # the loop is over
                            loop.call_soon_threadsafe(part.events.put_nowait, event)

                    part.generation = await asyncio.wrap_future(self.keeper.submit(prompt, how, listen))
                    parts.append(part)
        except BaseException:
            for part in parts:
                assert part.generation is not None
                self.keeper.cancel(part.generation)
            raise
        return parts

    async def _pieces(self, part: _AnswerPart) -> AsyncIterator[tuple[str, ChosenToken | None]]:
        """The text of an answer as it comes."""
        while not part.ended:
            event = await part.events.get()
            if event.ended.startswith(FAILED):
                part.ended = FAILED
                raise _Refused(500, f"the step failed: {event.ended.removeprefix(FAILED)[2:]}", "server_error")
            text = ""
            if event.token is not None:
                part.tokens += 1
                text = part.answer.add(event.token.id)
            part.ended = event.ended
            if part.answer.stopped and not part.ended:
                part.ended = STOP
                assert part.generation is not None
                self.keeper.cancel(part.generation, STOP)
            if part.ended and not part.answer.stopped:
                text += part.answer.end()
            elif part.answer.stopped:
                part.ended = STOP
            yield text, event.token

    async def _whole(self, wanted: asked.Asked, parts: list[_AnswerPart], writer: asyncio.StreamWriter) -> None:
        choices = []
        for part in parts:
            texts, tokens = [], []
            async for text, token in self._pieces(part):
                texts.append(text)
                tokens += [token] if token is not None else []
            logs = self._logprobs(wanted, tokens)
            choices.append(asked.choice(wanted.chat, False, part.index, "".join(texts), part.ended, logs))
        await _send(writer, 200, {**asked.head(wanted.chat, self.model, False), "choices": choices, "usage": self._usage(wanted, parts)})

    async def _streamed(self, wanted: asked.Asked, parts: list[_AnswerPart], writer: asyncio.StreamWriter) -> None:
        head = asked.head(wanted.chat, self.model, True)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        lock = asyncio.Lock()

        async def tell(part: _AnswerPart) -> None:
            async for text, token in self._pieces(part):
                if text or part.ended:
                    logs = self._logprobs(wanted, [token] if token is not None else [])
                    one = asked.choice(wanted.chat, True, part.index, text, part.ended, logs)
                    async with lock:
                        await _piece(writer, {**head, "choices": [one]})

        try:
            await asyncio.gather(*map(tell, parts))
            if wanted.usage:
                await _piece(writer, {**head, "choices": [], "usage": self._usage(wanted, parts)})
        except _Refused as refused:  # the head is out: an error is one more piece
            await _piece(writer, asked.problem(refused.words, refused.kind))
        await _chunk(writer, b"data: [DONE]\n\n")
        await _chunk(writer, b"")

    def _usage(self, wanted: asked.Asked, parts: list[_AnswerPart]) -> dict[str, Any]:
        shared = sum(part.generation.scheduled.shared for part in parts if part.generation is not None)
        return asked.usage(sum(map(len, wanted.prompts)), sum(part.tokens for part in parts), shared)

    def _logprobs(self, wanted: asked.Asked, tokens: list[ChosenToken]) -> Any:
        if wanted.samplings[0].logprobs is None:
            return None

        def text(number: int) -> str:
            decoder = self.words.decoder()
            return decoder.add(number) + decoder.end()

        if wanted.chat:
            def told(number: int, log: float | None) -> dict[str, Any]:
                return {"token": text(number), "logprob": log, "bytes": list(text(number).encode())}

            return {"content": [{**told(one.id, one.logprob), "top_logprobs": [told(*other) for other in one.likeliest]} for one in tokens]}
        return {
            "tokens": [text(one.id) for one in tokens], "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{text(number): log for number, log in one.likeliest} for one in tokens], "text_offset": [],
        }  # fmt: skip


# ---------------------------------------------------------------------- bytes on the wire


async def _read(reader: asyncio.StreamReader) -> _Request | None:
    """The next request of a connection; None where it has ended."""
    try:
        line = await reader.readuntil(b"\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise
    except asyncio.LimitOverrunError as error:
        raise _Refused(431, "the first line is too long") from error
    words = line.decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refused(400, "this is no HTTP/1 request")
    headers: dict[str, str] = {}
    size, count = len(line), 0
    while True:
        try:
            line = await reader.readuntil(b"\r\n")
        except asyncio.LimitOverrunError as error:
            raise _Refused(431, "a header is too long") from error
        if line == b"\r\n":
            break
        size, count = size + len(line), count + 1
        if size > MOST_HEAD or count > MOST_HEADERS:
            raise _Refused(431, "the headers are too long")
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if "transfer-encoding" in headers:
        raise _Refused(400, "a body in pieces is not read; give Content-Length")
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise _Refused(400, f"Content-Length is {length!r:.40}")
    if int(length) > MOST_BODY:
        raise _Refused(413, f"a body of {int(length)} bytes; at most {MOST_BODY}")
    body = await reader.readexactly(int(length)) if int(length) else b""
    return _Request(words[0], words[1].partition("?")[0], headers, body)


async def _gone(reader: asyncio.StreamReader) -> bool:
    """Until the client closes its side (True), or says something before it has its answer."""
    return not await reader.read(1)


async def _send(writer: asyncio.StreamWriter, status: int, content: Mapping[str, Any], *, close: bool = False) -> None:
    await _send_bytes(writer, status, json.dumps(content).encode(), "application/json", close)


async def _send_text(writer: asyncio.StreamWriter, text: str) -> None:
    await _send_bytes(writer, 200, text.encode(), "text/plain; version=0.0.4", False)


async def _send_bytes(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str, close: bool) -> None:
    more = "Connection: close\r\n" if close else "Retry-After: 1\r\n" if status == 429 else ""
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def _piece(writer: asyncio.StreamWriter, content: Mapping[str, Any]) -> None:
    await _chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


async def _chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
    await writer.drain()
