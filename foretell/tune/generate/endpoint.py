"""An OpenAI-compatible HTTP endpoint. HTTPS unless it is this machine; the key comes from the environment and is told to nobody else.

Redirects are not followed, as they would take the key elsewhere; proxies are not used.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from foretell.decode import json_of
from foretell.errors import UserError
from foretell.tune.generate.budget import ANSWER_TOKENS, TokenPrices
from foretell.tune.generate.talk import ChatMessage, EndpointError, MalformedAnswer, TextAnswer

KEY = "FORETELL_GENERATOR_KEY"
_PATH = "/chat/completions"
_MOST_BYTES = 8 << 20
_PIECE = 1 << 16
_AGAIN = (429, 500, 502, 503, 504, 529)
TRIES = 3
_WAIT_SECONDS = 1.0
_MOST_WAIT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class HttpEndpoint:
    """One model behind one URL."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    prices: TokenPrices = field(default_factory=TokenPrices)
    temperature: float | None = None
    seconds: float = 180.0
    """For one answer."""
    wait_seconds: float = _WAIT_SECONDS

    def __post_init__(self) -> None:
        parts = checked(self.url)
        if any(ord(one) < 33 or ord(one) > 126 for one in self.key):
            raise UserError("the key of the generator has characters that no header may have", f"the key alone in {KEY}")
        object.__setattr__(self, "_parts", parts)

    @property
    def where(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    def complete(self, role: str, messages: Sequence[ChatMessage]) -> TextAnswer:
        """Tried again where the endpoint says that it is busy."""
        asked: dict[str, Any] = {"model": self.model, "messages": [{"role": one.role, "content": one.content} for one in messages],
                                 "max_tokens": ANSWER_TOKENS}  # fmt: skip
        if self.temperature is not None:
            asked["temperature"] = self.temperature
        body = json.dumps(asked).encode()
        begun, problem = time.monotonic(), ""
        for turn in range(TRIES):
            try:
                status, headers, content = self._posted(body)
            except (OSError, http.client.HTTPException, TimeoutError) as error:
                problem = " ".join(str(error).split()) or type(error).__name__
                status, headers, content = 0, {}, b""
            if status == 200:
                return _completion(content, self.prices, time.monotonic() - begun, body)
            if status:
                problem = f"HTTP {status}{_said(content)}"
                if status not in _AGAIN:
                    break
            if turn + 1 < TRIES:
                time.sleep(_pause(headers, turn, self.wait_seconds))
        raise EndpointError(f"the generator at {self.where} does not answer: {problem}", _remedy(problem))

    def _posted(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        parts: SplitResult = self._parts  # type: ignore[attr-defined]
        host = parts.hostname or ""
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(host, parts.port, timeout=self.seconds, context=ssl.create_default_context())
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=self.seconds)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        path = parts.path.rstrip("/")
        path = path if path.endswith(_PATH) else path + _PATH
        try:
            until = time.monotonic() + self.seconds
            connection.request("POST", path + (f"?{parts.query}" if parts.query else ""), body, headers)
            answer = connection.getresponse()
            content = _content(answer, connection.sock, until)
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content
        finally:
            connection.close()


def _content(answer: http.client.HTTPResponse, connection: socket.socket | None, until: float) -> bytes:
    """All of it, before `until` however slowly it trickles."""
    found = bytearray()
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("it has not ended its answer in time")
        if connection is not None:
            connection.settimeout(left)
        more = answer.read1(_PIECE)
        if not more:
            return bytes(found)
        found += more
        if len(found) > _MOST_BYTES:
            raise MalformedAnswer("the generator's answer does not end", "another endpoint")


def checked(url: str) -> SplitResult:
    """An address that a key may be sent to."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"the generator's URL cannot be read: {error}", "https://HOST/v1") from None
    if parts.scheme not in ("http", "https") or not host or parts.username is not None or parts.fragment:
        raise UserError(f"{parts.scheme or 'that'}://{host or ''} is no generator's URL", "https://HOST/v1, and the key in the environment")
    if parts.scheme == "http" and not is_loopback(host):
        raise UserError(f"http to {host} would send the key and the code in the clear", f"https://{host}, or an endpoint on this machine")
    if any(ord(one) < 33 or ord(one) > 126 for one in url):
        raise UserError("the generator's URL has characters that no URL may have", "https://HOST/v1")
    return parts


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _completion(content: bytes, prices: TokenPrices, seconds: float, body: bytes) -> TextAnswer:
    try:
        data = json_of(content)
        text = data["choices"][0]["message"]["content"]
        usage = data.get("usage") or {}
        tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise MalformedAnswer("the generator's answer is not in OpenAI's format", "a URL that ends in /v1, of a chat model") from None
    if not isinstance(text, str):
        raise MalformedAnswer("the generator's answer has no text", "a chat model")
    known = [one if type(one) is int and 0 <= one < 1 << 40 else len(what) for one, what in zip(tokens, (body, text.encode()), strict=True)]
    return TextAnswer(text=text, tokens_in=known[0], tokens_out=known[1], seconds=seconds, money=prices.of(known[0], known[1]))


def _said(content: bytes) -> str:
    """What an error says of itself, on one line."""
    try:
        error = json_of(content)["error"]
        text = error["message"] if isinstance(error, Mapping) else error
    except (ValueError, LookupError, TypeError):
        text = ""
    return f": {' '.join(str(text).split())[:200]}" if text else ""


def _pause(headers: Mapping[str, str], turn: int, least: float) -> float:
    asked = headers.get("retry-after", "")
    return min(_MOST_WAIT_SECONDS, max(float(asked) if asked.isdigit() else 0.0, least * 2**turn))


def _remedy(problem: str) -> str:
    if "401" in problem or "403" in problem:
        return f"the key in {KEY}"
    if "404" in problem:
        return "a URL that ends in /v1, and --model"
    return "see that it runs, or another --generator; what was found is kept"
