"""A server that answers at once: what the load generator itself can do. `python -m foretell.serve.bench.null` prints its port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_PIECE = b'data: {"id": "null", "object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": null, "logprobs": null}]}\n\n'


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
        wanted = json.loads(await reader.readexactly(length))["max_tokens"]
        writer.write(HEAD + _chunk(_PIECE) * wanted + _chunk(b"data: [DONE]\n\n") + _chunk(b""))
        await writer.drain()
    writer.close()


def _chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=2048)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


def _end_with_parent() -> None:
    """Whoever started it holds the other end of standard input."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_serve())
