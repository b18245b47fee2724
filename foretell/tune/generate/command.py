"""A program of this machine as a generator: the prompt as JSON on its standard input, the answer as text on its standard output.

    {"role": "coder", "messages": [{"role": "system", "content": "..."}, ...]}  ──►  the answer, or {"text": ..., "tokens_in": ..., "tokens_out": ...}
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from foretell.decode import json_of
from foretell.errors import UserError
from foretell.tune.generate.budget import TokenPrices
from foretell.tune.generate.talk import ChatMessage, EndpointError, MalformedAnswer, TextAnswer

_MOST_BYTES = 8 << 20
_POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class CommandGenerator:
    """A command line."""

    command: str
    prices: TokenPrices = field(default_factory=TokenPrices)
    seconds: float = 180.0

    def complete(self, role: str, messages: Sequence[ChatMessage]) -> TextAnswer:
        begun = time.monotonic()
        asked = json.dumps({"role": role, "messages": [asdict(one) for one in messages]}).encode()
        text = self._answered(asked)
        tokens_in, tokens_out = len(asked), len(text.encode())
        with contextlib.suppress(ValueError):
            told = json_of(text)
            if isinstance(told, dict) and isinstance(told.get("text"), str):
                text = told["text"]
                counts = [told.get("tokens_in"), told.get("tokens_out")]
                tokens_in, tokens_out = (one if type(one) is int and 0 <= one < 1 << 40 else known
                                         for one, known in zip(counts, (tokens_in, tokens_out), strict=True))  # fmt: skip
        money = self.prices.of(tokens_in, tokens_out)
        return TextAnswer(text=text, tokens_in=tokens_in, tokens_out=tokens_out, seconds=time.monotonic() - begun, money=money)

    def _answered(self, asked: bytes) -> str:
        """What it printed; it and all that it started are gone afterwards."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
            given.write(asked)
            given.seek(0)
            try:
                process = subprocess.Popen(self._words(), stdin=given, stdout=said, stderr=complained, start_new_session=True)
            except OSError as error:
                raise EndpointError(f"the generator does not start: {error.strerror or error}", "--generator COMMAND, as you would type it") from None
            try:
                problem = self._waited(process, said.fileno())
            finally:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if problem or process.returncode:
                complained.seek(max(0, os.fstat(complained.fileno()).st_size - 500))
                last = " ".join(complained.read().decode(errors="replace").split()[-20:])
                told = problem or f"exit status {process.returncode}"
                raise EndpointError(f"the generator ended with {told}" + (f": {last}" if last else ""), "run it by hand; what was found is kept")
            said.seek(0)
            try:
                return said.read(_MOST_BYTES).decode()
            except UnicodeDecodeError:
                raise MalformedAnswer("the generator's answer is no text in UTF-8", "another --generator") from None

    def _words(self) -> list[str]:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise UserError(f"--generator {self.command!r} is no command: {error}", "as you would type it in a shell") from None
        if not words:
            raise UserError("--generator is empty", "a URL or a command")
        return words

    def _waited(self, process: subprocess.Popen[bytes], handle: int) -> str:
        """Until it ends; why it had to be ended."""
        until = time.monotonic() + self.seconds
        while process.poll() is None:
            if time.monotonic() > until:
                return f"no answer after {self.seconds:g} s"
            if os.fstat(handle).st_size > _MOST_BYTES:
                return "an answer that does not end"
            time.sleep(_POLL_SECONDS)
        return ""
