"""What ranks and their launcher say to each other beside the model's own collectives: of this job, from no further than it must
come, and no longer than it may be.

The launcher draws a token for each job and hands it to its ranks in their environment, which other users of the machine cannot
read. With it every message is signed (HMAC-SHA256), together with what it is about, so that none can be made up, changed or played
again in another place. Ranks that torchrun starts have no token: there, and for collectives themselves (gloo and NCCL sign nothing),
the network between machines must be one that is trusted.
"""

from __future__ import annotations

import hmac
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from foretell.runtime.process.launch import TOKEN

MOST_BYTES = 2**26
"""Of one message."""
_TAG_BYTES = 32


class Forged(RuntimeError):
    """A message that is not of this job, or not what was to come here."""


def seal(content: bytes, about: str) -> bytes:
    """To be sent; `about` says where in the conversation it belongs."""
    token = os.environ.get(TOKEN, "")
    return _tag(token, content, about) + content if token else content


def unseal(message: bytes, about: str) -> bytes:
    """What was sent there; raises `Forged` where that was not by a rank of this job."""
    token = os.environ.get(TOKEN, "")
    if len(message) > MOST_BYTES:
        raise Forged(f"a message between ranks ({about}) has {len(message):,} bytes")
    if not token:
        return message
    tag, content = message[:_TAG_BYTES], message[_TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(token, content, about)):
        raise Forged(f"a message between ranks ({about}) is not of this job")
    return content


def _tag(token: str, content: bytes, about: str) -> bytes:
    place = about.encode()
    return hmac.digest(token.encode(), len(place).to_bytes(8, "big") + place + content, "sha256")


def served_store(host: str, port: int, limit: timedelta) -> Any:
    """A store that is reached at that address and no other; at all of this machine's where that is none of its own."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[4])
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit)
    there = listener.getsockname()[1]
    return dist.TCPStore(host, there, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach())
