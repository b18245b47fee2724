"""What a client asks for, by OpenAI's names, read and refused; and the objects that answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.errors import UserError
from foretell.serve.sampling import Sampling
from foretell.serve.text import Words

MOST_ANSWERS, MOST_STOPS = 16, 4
ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_DONE = ("echo", "suffix", "tools", "functions", "response_format", "logit_bias", "best_of", "presence_penalty", "frequency_penalty")
"""That would change the answer and are not done here: refused where they ask for anything."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request of a client."""

    prompts: tuple[tuple[int, ...], ...]
    """Each answered `answers` times."""
    samplings: tuple[Sampling, ...]
    """Of every answer to a prompt."""
    stops: tuple[str, ...]
    stream: bool
    chat: bool
    usage: bool
    """A last piece of a stream says how many tokens there were."""


class OtherModel(UserError):
    """A request names a model that is not served here."""


def read(body: bytes, words: Words, *, chat: bool, longest: int, model: str) -> Asked:
    """A request's body; raises UserError for what cannot be done, naming the entry."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is no JSON: {str(error)[:100]}", "a JSON object") from error
    if not isinstance(given, dict):
        raise UserError("the body is no JSON object", 'such as {"prompt": "Once", "max_tokens": 16}')
    _refuse_halves(given)
    if given.get("model") not in (None, "", model):
        raise OtherModel(f"there is no model {given['model']!r:.60} here", f"{model!r}, or no 'model' at all")
    for name in NOT_DONE:
        if given.get(name) not in (None, False, 0, 0.0, "", [], {}) and not (name == "best_of" and given[name] == 1):
            raise UserError(f"'{name}' is not supported", f"leave {name} out")
    prompts = [tuple(words.chat(_messages(given.get("messages"))))] if chat else _prompts(given.get("prompt"), words)
    if any(not one for one in prompts):
        raise UserError("a prompt is empty", "at least one token")
    answers = _whole(given, "n", 1, 1, MOST_ANSWERS)
    most = _whole(given, "max_completion_tokens" if given.get("max_completion_tokens") is not None else "max_tokens", None, 1, 10**9)
    if most is None:
        most = max(1, longest - max(map(len, prompts))) if chat else 16
    seed = _whole(given, "seed", None, -(2**63), 2**63)
    seed = uuid.uuid4().int % 2**63 if seed is None else seed
    samplings = tuple(
        Sampling(
            most=most, temperature=_number(given, "temperature", 1.0, 0.0, 100.0), top_p=_number(given, "top_p", 1.0, 0.0, 1.0),
            top_k=max(0, _whole(given, "top_k", 0, -1, 10**9) or 0), seed=seed + number, logprobs=_logprobs(given, chat),
            stop_tokens=() if given.get("ignore_eos") else words.stops,
        )
        for number in range(answers or 1)
    )  # fmt: skip
    stream = given.get("stream") or False
    if not isinstance(stream, bool):
        raise UserError(f"'stream' is {stream!r:.40}", "true or false")
    options = given.get("stream_options")
    return Asked(
        prompts=tuple(prompts), samplings=samplings, stops=_stops(given.get("stop")), stream=stream, chat=chat,
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )  # fmt: skip


def _refuse_halves(given: Mapping[str, Any]) -> None:
    """JSON can write half of a pair of UTF-16, which no text has."""
    for name in ("prompt", "messages", "stop"):
        try:
            json.dumps(given.get(name), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"'{name}' has half a character: \\u{ord(error.object[error.start]):04x}", "both halves, or none") from error


def _prompts(prompt: Any, words: Words) -> list[tuple[int, ...]]:
    if isinstance(prompt, str):
        return [tuple(words.encode(prompt))]
    if isinstance(prompt, list) and prompt:
        if all(_is_token(one) for one in prompt):
            return [tuple(prompt)]
        if all(isinstance(one, str) for one in prompt):
            return [tuple(words.encode(one)) for one in prompt]
        if all(isinstance(one, list) and one and all(_is_token(token) for token in one) for one in prompt):
            return [tuple(one) for one in prompt]
    raise UserError(f"'prompt' is {prompt!r:.60}", "a text, token numbers, or a list of either")


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _messages(messages: Any) -> Sequence[Mapping[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"'messages' is {messages!r:.60}", 'such as [{"role": "user", "content": "Hello"}]')
    found = []
    for one in messages:
        if not isinstance(one, dict) or one.get("role") not in ROLES:
            raise UserError(f"a message is {one!r:.60}", f"with a role ({', '.join(ROLES)}) and content")
        content = one.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            raise UserError(f"the content of a message is {content!r:.60}", "text")
        found.append({"role": one["role"], "content": content})
    return found


def _whole(given: Mapping[str, Any], name: str, default: int | None, low: int, high: int) -> int | None:
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"'{name}' is {value!r:.40}", f"a whole number from {low} to {high}")
    return value


def _number(given: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UserError(f"'{name}' is {value!r:.40}", f"a number from {low:g} to {high:g}")
    return float(value)


def _logprobs(given: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        return _whole(given, "logprobs", None, 0, 20)
    return _whole(given, "top_logprobs", 0, 0, 20) if given.get("logprobs") else None


def _stops(value: Any) -> tuple[str, ...]:
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > MOST_STOPS or not all(isinstance(one, str) and one for one in found):
        raise UserError(f"'stop' is {value!r:.60}", f"a text, or up to {MOST_STOPS}")
    return tuple(found)


# ---------------------------------------------------------------------- answers


def head(chat: bool, model: str, stream: bool) -> dict[str, Any]:
    """What all objects of one answer begin with."""
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def choice(chat: bool, stream: bool, index: int, text: str, ended: str, logprobs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "finish_reason": ended or None, "logprobs": logprobs}
    if not chat:
        return {**found, "text": text}
    return {**found, "delta" if stream else "message": {"role": "assistant", "content": text}}


def usage(prompts: int, answers: int, shared: int) -> dict[str, Any]:
    """Tokens, and how many of the prompts were found computed."""
    return {
        "prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers,
        "prompt_tokens_details": {"cached_tokens": shared},
    }  # fmt: skip


def problem(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
