"""Whose an exception is that ends a run: of the user's model or data, of a library they use, or foretell's own."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from foretell.trace.sandbox.blame import is_users

_FORETELL = Path(__file__).resolve().parents[2]
_TORCH = Path(torch.__file__).resolve().parent


def is_ours(error: BaseException) -> bool:
    """Whether foretell's own code is to blame: it raised itself, or it was called by the model and what it called raised."""
    rooms = [_room(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    if "foretell" not in rooms:
        return not rooms
    last = len(rooms) - rooms[::-1].index("foretell")
    return last == len(rooms) or ("model" in rooms[:last] and "model" not in rooms[last:])


def _room(file: str) -> str:
    """foretell, torch, or model: the user's files, the zoo's and any other library."""
    if file.startswith("<") or "torchinductor_" in file:
        return "torch"  # generated code
    path = Path(file).resolve()
    if path.is_relative_to(_TORCH):
        return "torch"
    return "foretell" if path.is_relative_to(_FORETELL) and not path.is_relative_to(_FORETELL / "zoo") else "model"


def words(error: BaseException) -> str:
    """`ValueError: bad shape (mine.py:12 in forward)`: what was raised and the last line of the user's that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if is_users(frame.filename)] or [f for f in frames if _room(f.filename) == "model"]
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    raised = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = theirs[-1] if theirs else frames[-1] if frames else None
    return f"{raised} ({place.filename}:{place.lineno} in {place.name})" if place is not None else raised


def trail(error: BaseException) -> str:
    """The user's own frames and what was raised, as Python prints them; empty where none is theirs."""
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return "".join(traceback.format_list(theirs) + traceback.format_exception_only(error)).rstrip() if theirs else ""
