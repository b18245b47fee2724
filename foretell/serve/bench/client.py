"""One streamed request to a server of OpenAI's interface, and when each piece of its answer came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from foretell.errors import UserError

MOST_LINE = 2**20
BUSY = 429
LOST = "the connection was lost before the end"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a server is."""

    host: str
    port: int
    path: str
    """Before `/completions`."""
    tls: bool = False

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.path}"


@dataclass
class BenchAnswer:
    """What came of one request; times in seconds since the load began."""

    due: float
    """When it was to be sent."""
    prompt: int
    """Tokens of it, as asked for."""
    wanted: int
    sent: float = 0.0
    ended: float = 0.0
    came: list[float] = field(default_factory=list)
    """Each piece with text."""
    told: int | None = None
    """Tokens of the answer as the server counts them, where it says."""
    status: int = 0
    failed: str = ""
    """Why there is no whole answer."""

    @property
    def tokens(self) -> int:
        """Pieces that came; where the server puts several tokens in one, as many as it says, and no more than were asked for."""
        return max(len(self.came), min(self.told or 0, self.wanted))

    @property
    def ttft(self) -> float:
        return self.came[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.came[-1] - self.came[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.came, self.came[1:], strict=False)]

    @property
    def good(self) -> bool:
        return not self.failed


def endpoint_of(url: str) -> Endpoint:
    """A server's address as a user writes it."""
    example = "such as http://127.0.0.1:8000/v1"
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise UserError(f"'{url}' is no address: {error}", example) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise UserError(f"'{url}' is no address of a server", example)
    tls = parts.scheme == "https"
    return Endpoint(host=parts.hostname, port=port or (443 if tls else 80), path=parts.path.rstrip("/") or "/v1", tls=tls)


async def models(where: Endpoint) -> list[str]:
    """Names of the models that a server has."""
    try:
        async with _asked(where, "GET", "/models", b"") as (status, _, content):
            text = b"".join([piece async for piece in content])
        found = json.loads(text) if status == 200 else {}
        names = [str(one["id"]) for one in found["data"]]
    except OSError as error:
        raise UserError(f"nothing answers at {where}: {error.strerror or error}", "start the server first: foretell serve MODEL") from error
    except (ValueError, KeyError, TypeError, asyncio.IncompleteReadError) as error:
        remedy = "an address of OpenAI's interface, up to /v1; or name the model by --model"
        raise UserError(f"{where}/models does not list models", remedy) from error
    return names


async def ask(where: Endpoint, body: Mapping[str, Any], answer: BenchAnswer, began: float, limit: float) -> None:
    """Send a request and follow its answer to the end."""
    answer.sent = time.perf_counter() - began
    try:
        async with asyncio.timeout(limit):
            await _follow(where, body, answer, began)
    except TimeoutError:
        answer.failed = f"no end within {limit:g} s"
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        answer.failed = LOST if isinstance(error, asyncio.IncompleteReadError) else f"{type(error).__name__}: {error}"[:200]
    answer.ended = time.perf_counter() - began


async def _follow(where: Endpoint, body: Mapping[str, Any], answer: BenchAnswer, began: float) -> None:
    async with _asked(where, "POST", "/completions", json.dumps(body).encode()) as (status, headers, content):
        answer.status = status
        if status != 200 or "event-stream" not in headers.get("content-type", ""):
            text = b"".join([piece async for piece in content])
            answer.failed = f"{status}: {_message(text)}" if status != 200 else "the answer is no stream of events"
            return
        async for event in _events(content):
            if event == b"[DONE]":
                answer.failed = answer.failed or ("" if answer.came else "an answer without text")
                return
            _take(json.loads(event), answer, time.perf_counter() - began)
        answer.failed = answer.failed or LOST


def _take(piece: Any, answer: BenchAnswer, now: float) -> None:
    if not isinstance(piece, dict):
        raise ValueError("a piece of the answer is no object")
    if "error" in piece:
        answer.failed = _message(json.dumps(piece).encode())
    for choice in piece.get("choices") or ():
        if choice.get("text") or (choice.get("finish_reason") and not answer.came):
            answer.came.append(now)
    usage = piece.get("usage")
    if isinstance(usage, dict) and type(usage.get("completion_tokens")) is int:
        answer.told = usage["completion_tokens"]


def _message(text: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])[:200]
    return text[:200].decode(errors="replace")


# ---------------------------------------------------------------------- bytes on the wire


@contextlib.asynccontextmanager
async def _asked(where: Endpoint, method: str, path: str, body: bytes) -> AsyncIterator[tuple[int, dict[str, str], AsyncIterator[bytes]]]:
    """Status, headers and content of an answer, on a connection of its own."""
    reader, writer = await asyncio.open_connection(where.host, where.port, ssl=where.tls or None, limit=MOST_LINE)
    try:
        writer.write(
            f"{method} {where.path}{path} HTTP/1.1\r\nHost: {where.host}:{where.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        )
        await writer.drain()
        first = (await reader.readuntil(b"\r\n")).split()
        if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
            raise ValueError("the server does not speak HTTP/1")
        headers: dict[str, str] = {}
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        yield int(first[1]), headers, _content(reader, headers)
    finally:
        writer.close()


async def _content(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(2**16):
            yield piece


async def _events(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, however they are cut into chunks."""
    left = b""
    async for piece in content:
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if left.startswith(b"data:"):
        yield left[5:].strip()
