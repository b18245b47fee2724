"""The command to type next: the one that was typed, with a change that helps."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from foretell.quantities import FITS, NO, TIGHT, UNKNOWN, Prediction, Remedy

SHOWN = 4
"""Remedies that a screen has room for."""
REPEATED = ("--set", "--hint", "--freeze")
"""Options that may be given several times: a remedy adds to them."""
SPARE = 0.05
"""Share of a device that is left free where nothing was predicted."""
_PER_SAMPLE = ("activations", "logits", "temporaries", "inputs")


def asked(prediction: Prediction) -> list[str]:
    """The plainest command with this model and hardware, for answers that no command line asked for."""
    words = ["fit", model_name(prediction), "--on", hardware_spec(prediction)]
    sizes = {f"--{name.replace('_', '-')}": prediction.model.get(name) for name in ("micro_batch", "seq", "image")}
    return [*words, *(word for option, size in sizes.items() if size for word in (option, str(size)))]


def model_name(prediction: Prediction) -> str:
    """`llama3-8b`, from whichever form the source has."""
    source = prediction.model.get("source", prediction.model.get("name", ""))
    if isinstance(source, Mapping):
        source = source.get("model", "")
    return str(source) or "model"


def hardware_spec(prediction: Prediction, space: str = "") -> str:
    """`2x8xH100-SXM-80GB`; `space` stands between the counts and the name."""
    hardware, name = prediction.hardware, device_name(prediction)
    nodes, per_node = int(hardware.get("nodes", 1)), int(hardware.get("devices_per_node", 1))
    counts = f"{nodes}x{per_node}x" if nodes > 1 else f"{per_node}x" if per_node > 1 else ""
    return f"{counts}{space if counts else ''}{name or 'device'}"


def device_name(prediction: Prediction) -> str:
    """`H100-SXM-80GB`, from whichever form the hardware has; may be empty."""
    device = prediction.hardware.get("device", prediction.hardware.get("name", ""))
    return str(device.get("name", "")) if isinstance(device, Mapping) else str(device)


def device_count(prediction: Prediction) -> int:
    return int(prediction.hardware.get("nodes", 1)) * int(prediction.hardware.get("devices_per_node", 1))


def best(prediction: Prediction) -> Remedy | None:
    """The remedy to offer: the first that is predicted to fit; of a step that is tight, to leave more room."""
    wanted = {NO: (FITS, TIGHT), TIGHT: (FITS,)}.get(prediction.verdict, ())
    return next((item for item in prediction.remedies if item.verdict in wanted and (item.flag or item.command)), None)


def suggest(prediction: Prediction, typed: Sequence[str] = ()) -> list[str]:
    """The words of the next command, `foretell` first."""
    words = list(typed) or asked(prediction)
    if prediction.verdict == UNKNOWN:
        return ["foretell", "doctor"]
    remedy = best(prediction)
    if remedy is not None:
        return shlex.split(remedy.command) if remedy.command else ["foretell", *with_flag(words, remedy.flag)]
    if prediction.verdict != FITS:
        return ["foretell", *with_flag(words, "--json")]
    if prediction.time is not None and prediction.time.binds == "host" and not _compiled(prediction):
        return ["foretell", *with_flag(words, "--compile")]
    micro_batch = _micro_batch(words) if typed or prediction.model.get("micro_batch") else None
    if micro_batch is not None and _doubles(prediction):
        return ["foretell", *with_flag(words, f"--micro-batch {2 * micro_batch}")]
    return ["foretell", *with_flag(words, "--json")]


def _doubles(prediction: Prediction) -> bool:
    """Whether twice the samples fit beyond doubt: what grows with them may grow twice as much as it should."""
    memory = prediction.memory
    grows = sum(memory.categories.get(name, 0) for name in _PER_SAMPLE) + memory.reserved_bytes - memory.allocated_bytes
    return 0 < 2 * grows < memory.margin_bytes - SPARE * memory.capacity_bytes


def with_flag(words: Sequence[str], flag: str) -> list[str]:
    """`words` with the options of `flag` set; an option that stood there before is replaced."""
    new = shlex.split(flag)
    result = list(words)
    for position, word in enumerate(new):
        option = word.partition("=")[0]
        if not word.startswith("--") or option in REPEATED:
            continue
        has_value = "=" in word or (position + 1 < len(new) and not new[position + 1].startswith("--"))
        result = without(result, option, has_value=has_value)
    return result + new


def without(words: Sequence[str], option: str, *, has_value: bool) -> list[str]:
    """`words` less an option and its value."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word == option:
            skip = has_value
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def _compiled(prediction: Prediction) -> bool:
    recipe = prediction.model.get("recipe")
    return isinstance(recipe, Mapping) and recipe.get("compile", "none") not in ("none", False)


def _micro_batch(words: list[str]) -> int | None:
    """The micro-batch asked for; None when it cannot be told."""
    for before, word in zip(["", *words], words, strict=False):
        text = word if before == "--micro-batch" else word.partition("=")[2] if word.startswith("--micro-batch=") else ""
        if text:
            return int(text) if text.isdecimal() else None
    return 1
