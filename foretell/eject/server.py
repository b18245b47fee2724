"""A server in one file: a model of the zoo, the engine's rules in plain PyTorch, HTTP of the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import foretell.zoo as zoo
from foretell.eject.compose import literal, part_of, piece, script
from foretell.eject.model import zoo_text
from foretell.errors import UserError
from foretell.plan.text import plain

_IMPORTS = "from typing import Any\n\nimport torch\nfrom torch import Tensor, nn\n"


def server(model: str, overrides: Mapping[str, Any], *, pages: int, size: int, running: int, tokens: int, seed: int) -> str:
    """The file's text; raises UserError for models that have no source to copy or no door for a server."""
    if model not in zoo.names():
        raise UserError(f"{model} is not of the zoo, and a file that needs torch alone has the model's own source", "a name of `foretell zoo`")
    entry = zoo.get(model)
    text = zoo_text(entry.module)
    if "positions:" not in text or "keep:" not in text:
        raise UserError(f"{model} takes no positions and rows to keep in its forward", "gpt2, or a Llama of the zoo")
    words = ", ".join(f"{name}={literal(value)}" for name, value in {**entry.config, **overrides}.items())
    own = part_of(f'"""The model"""\n{_IMPORTS}\n{text}\n\n\ndef build_model() -> nn.Module:\n    return build({words})\n')
    values = {
        "NAME": literal(model), "PAGES": literal(pages), "PAGE": literal(size), "RUNNING": literal(running), "TOKENS": literal(max(tokens, running)),
        "SEED": literal(seed),
    }  # fmt: skip
    header = "\n".join([
        f"Serve {plain(model)} behind OpenAI's /v1/completions. Written by `foretell serve --eject`; needs torch alone.",
        "",
        "    python FILE.py --weights model.safetensors --port 8000",
        "",
        "Continuous batching, prompts in pieces, keys and values in pages; each byte is a token. The model's attention is taken over",
        "from outside, its code is as it is. No shared prompts, no stop strings, no chat, no kernels of its own.",
    ])  # fmt: skip
    return script(header, [own, piece("serving", {}, values)])
