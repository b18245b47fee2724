"""Trace a model of the zoo: as `trace.sandbox.child`, without torch._dynamo, which only other people's code asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.trace.sandbox import light_dynamo
from foretell.trace.sandbox.child import PRELOAD as _PRELOAD
from foretell.trace.sandbox.child import answered, trace_asked
from foretell.trace.sandbox.process import serve

PRELOAD = tuple(name for name in _PRELOAD if name != light_dynamo.NAME)


def traced(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The reply; where all of torch._dynamo is needed after all, it is imported and the step traced once more."""
    light_dynamo.install()
    try:
        with light_dynamo.refusing():
            return trace_asked(asked)
    except light_dynamo.AllOfDynamoRefused:
        light_dynamo.whole()
        return trace_asked(asked)


def main() -> None:
    serve(lambda requests, reply: reply(answered(lambda: traced(requests[0]))))


if __name__ == "__main__":
    main()
