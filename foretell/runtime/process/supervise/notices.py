"""Word that this machine is about to be taken away: a file that appears, or a server that says so. Off unless asked for.

It is answered as SIGUSR1 is: the run saves and leaves. Signals themselves (SIGTERM, SIGUSR1 from a scheduler) need nothing of this.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from foretell.errors import UserError

GROUP = "foretell.notices"
"""Entry points of plug-ins: a function without arguments that gives what was said, empty where nothing was."""
LOOK_SECONDS = 1.0
ANSWER_SECONDS = 2.0
"""A server that has not answered by then is asked again at the next look."""
MOST_BYTES = 64 * 1024
_NONE = ("", "false", "none", "null", "[]", "{}")
"""Answers that say that nothing is planned."""

Look = Callable[[], str]


def look_of(where: str) -> Look:
    """What looks there: `http://...`, the name of a plug-in, or a file."""
    if where.startswith(("http://", "https://")):
        return _server(where)
    if os.sep not in where and "." not in where:
        found = list(metadata.entry_points(group=GROUP, name=where))
        if not found:
            known = ", ".join(sorted(one.name for one in metadata.entry_points(group=GROUP)))
            raise UserError(f"--notice {where} is neither a file nor an address, and no plug-in has that name",
                            f"write a file as ./{where}; installed plug-ins: {known or 'none'}")  # fmt: skip
        plugged: Look = found[0].load()
        return plugged
    path = Path(where)
    if not path.parent.is_dir():
        raise UserError(f"--notice {where}: there is no folder {path.parent}", "name a file in a folder that is there")
    if path.exists():
        raise UserError(f"--notice {where} is there already", "delete it, or name a file that will appear when the run is to leave")
    return lambda: f"{path} has appeared" if path.exists() else ""


def _server(address: str) -> Look:
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise UserError(f"--notice {address} names no host", "give such as http://169.254.169.254/latest/meta-data/spot/instance-action")
    import http.client  # brings ssl: some megabytes, for whoever asks a server

    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def look() -> str:
        """What a status of 200 comes with, unless that says no. Nothing is followed elsewhere, and no proxy is asked."""
        connection = kind(host, port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", path, headers={"Metadata-Flavor": "Google", "Metadata": "true"})
            answer = connection.getresponse()
            said = answer.read(MOST_BYTES).decode("utf-8", "replace").strip()
            notice = answer.status == 200 and said.casefold() not in _NONE
            return f"{address} says {' '.join(said.split())[:80]}" if notice else ""
        finally:
            connection.close()

    return look


class Notices:
    """Looks about once a second, each in a thread of its own: a server may take its time."""

    def __init__(
        self, where: Sequence[str], say: Callable[[str], None], leave: Callable[[], None], *, look_s: float = LOOK_SECONDS
    ) -> None:  # fmt: skip
        """`leave` is called once, from one of them."""
        self.looks, self.say, self.leave, self.look_s = [look_of(one) for one in where], say, leave, look_s
        self._done, self._turn = threading.Event(), threading.Lock()

    def __enter__(self) -> Notices:
        for look in self.looks:
            threading.Thread(target=self._run, args=(look,), name="foretell-notice", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()

    def _run(self, look: Look) -> None:
        while not self._done.wait(self.look_s):
            said = ""
            with contextlib.suppress(Exception):  # a server that does not answer, or a plug-in that fails, says nothing
                said = str(look() or "")
            with self._turn:
                if said and not self._done.is_set():
                    self._done.set()
                    self.say(f"notice: {said}; the run saves and leaves")
                    self.leave()
