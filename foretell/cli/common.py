"""What every command needs: how to speak, how to fail, how to wait."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from foretell.errors import ForetellError, InternalError, UserError

if TYPE_CHECKING:
    import typer
    from rich.text import Text

    from foretell.quantities import Prediction

YES, NO_OR_FAILED, BAD_INPUT, BUG, INTERRUPTED = 0, 1, 2, 70, 130

JSON_HELP = "Print one JSON object instead of text."
VERBOSE_HELP = "Everything that is known of the answer: all assumptions, all large tensors."
DEBUG_HELP = "Show the traceback of a failure (also FORETELL_DEBUG=1)."
_TRACKER = "please report it on the project's issue tracker, with the command and what --debug prints"

_SURROUNDINGS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENOMEM)
"""What the operating system says of a disk, a folder or a limit, and not of what was asked of it."""

Result = TypeVar("Result")
_words: list[str] = []
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All but tab and newline."""


def setup(words: Sequence[str]) -> None:
    """Remember what was typed, and keep other packages' warnings off the screen unless debugging."""
    _words[:] = words
    if not debugging():
        import warnings

        warnings.simplefilter("ignore")


def typed() -> list[str]:
    return list(_words)


def _option_words() -> list[str]:
    """Typed words up to `--`, after which nothing is an option."""
    return _words[: _words.index("--")] if "--" in _words else _words


SCRIPTED = ("fit", "plan", "watch", "compare diff", "run supervise")
"""Commands that take the command line of a script after `--`, in the place of a model."""


def without_script(words: Sequence[str]) -> list[str]:
    """The words that are foretell's own."""
    scripted = bool(words) and (words[0] in SCRIPTED or " ".join(words[:2]) in SCRIPTED)
    return list(words[: words.index("--")] if scripted and "--" in words else words)


def script_words() -> list[str] | None:
    """The command line of the user's script, if one was typed."""
    return _words[_words.index("--") + 1 :] if _words and _words[0] in SCRIPTED and "--" in _words else None


def check_beside_script(model: str | None, context: typer.Context, taken: Sequence[str], remedy: str) -> None:
    """Raise where a model is named beside a script, or an option is typed that is not among those `taken` beside one."""
    if model is not None:
        raise UserError(f"a model ({model}) and a script are given", "name one of them")
    source = context.get_parameter_source
    typed = [one for one in context.command.params if one.name and (how := source(one.name)) is not None and how.name == "COMMANDLINE"]
    if other := [one.opts[0] for one in typed if one.name not in (*taken, "model")]:
        raise UserError(f"{', '.join(other)} beside a script, which says so itself", remedy)


def wants_json() -> bool:
    return "--json" in _option_words()


def verbose() -> bool:
    return "--verbose" in _option_words()


def debugging() -> bool:
    return "--debug" in _option_words() or os.environ.get("FORETELL_DEBUG", "") not in ("", "0")


def speaks() -> bool:
    """Only rank 0 prints."""
    return os.environ.get("RANK", "0").strip() in ("", "0")


def versions() -> dict[str, str]:
    """foretell, Python and torch, without importing torch."""
    import platform
    from importlib import metadata

    from foretell import __version__

    found = {"foretell": __version__, "python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    return found


# --- speaking --------------------------------------------------------------------------------------------------------


def emit(text: str | Text, stream: TextIO | None = None) -> None:
    """Print: in colour on a terminal that wants it, plainly elsewhere, never wrapped."""
    out = stream or sys.stdout
    if not speaks():
        return
    try:
        if isinstance(text, str):
            print(encodable(text, out), file=out, flush=True)
        elif coloured(out):
            from rich.console import Console

            Console(file=out, highlight=False).print(text, soft_wrap=True)
        else:
            print(encodable(text.plain, out), file=out, flush=True)
    except OSError as error:  # `foretell zoo | head`, a terminal that was closed: nobody reads, and the answer stands
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        to_nowhere(out)


def to_nowhere(stream: TextIO) -> None:
    """Whatever is still written there, also when Python ends, is lost and fails no more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def emit_screen(prediction: Prediction, typed: Sequence[str] = ()) -> None:
    """Print a prediction for people; `typed` is what asked for it."""
    from foretell.report.terminal import screen

    emit(screen.render(prediction, width(), typed=typed, ascii_only=ascii_only(sys.stdout), verbose=verbose()))


def emit_answer(prediction: Prediction) -> None:
    """Print it for people before there is any advice, which `emit_advice` prints below it."""
    from foretell.report.terminal import screen

    emit(screen.answer(prediction, width(), ascii_only=ascii_only(sys.stdout), verbose=verbose()))


def emit_advice(prediction: Prediction, typed: Sequence[str]) -> None:
    from foretell.report.terminal import screen

    emit(screen.advice(prediction, width(), typed=typed, ascii_only=ascii_only(sys.stdout)))


def emit_json(content: Mapping[str, Any]) -> int:
    """Print one JSON object with what every one of them has; `content` comes over it, versions come together."""
    import json

    from foretell.report import schema

    frame = schema.envelope({**versions(), **content.get("versions", {})})
    emit(json.dumps(schema.plain({**frame, **content, "versions": frame["versions"]}), indent=2))
    return YES


def coloured(stream: TextIO) -> bool:
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def ascii_only(stream: TextIO) -> bool:
    """Whether the stream cannot carry the characters of the screen."""
    try:
        "█▚…×–−▲·".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def encodable(text: str, stream: TextIO) -> str:
    """What the stream can carry. Names in files and paths move no cursor and turn no text around: controls are escaped."""
    encoding = stream.encoding or "utf-8"
    text = _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.encode(encoding, "replace").decode(encoding)


def width() -> int:
    """Columns to fill: the terminal's or COLUMNS, at most 120; 80 where there is neither."""
    import shutil

    return max(40, min(120, shutil.get_terminal_size((80, 24)).columns))


# --- failing ---------------------------------------------------------------------------------------------------------


def fail(error: Exception) -> int:
    """Tell what went wrong, for people on stderr or as JSON on stdout; the exit status."""
    known = _as_user_error(error)
    if known is not None:
        kind = type(known).__name__ if type(error).__module__.startswith("foretell") else "UsageError"
        message, remedy, detail, status = known.problem, known.remedy, known.detail, known.exit_code
        line = f"error: {message}" + (f"; try: {remedy}" if remedy else "")
    else:
        kind, detail, status = type(error).__name__, "", BUG
        text = str(error) if isinstance(error, ForetellError) else f"{kind}: {error}" if str(error) else kind
        message, remedy = f"foretell has a bug: {text}", _TRACKER
        line = f"{message}; {remedy}"
    if debugging():
        import traceback

        detail = "\n".join(filter(None, [detail, "".join(traceback.format_exception(error)).rstrip()]))
    if wants_json():
        from foretell.report import schema

        emit_json(schema.failure(kind, message, remedy=remedy, detail=detail, versions=versions()))
    else:
        emit("\n".join(filter(None, [" ".join(line.split()), detail])), sys.stderr)
    return status


def _as_user_error(error: Exception) -> UserError | None:
    """The error as the user's to mend, if it is: foretell's own kind, a disk or a folder's, or typer's complaint about usage."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno in _SURROUNDINGS:
        place = f"{error.filename}: " if error.filename else ""
        known = UserError(f"{place}{error.strerror or error}", "make room, or give a place that can be read and written")
        known.exit_code = NO_OR_FAILED
        return known
    message: Callable[[], str] | None = getattr(error, "format_message", None)
    if message is None or isinstance(error, ForetellError):
        return None
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "foretell"
    return UserError(" ".join(message().split()).rstrip("."), f"{path} --help")


# --- waiting ---------------------------------------------------------------------------------------------------------


def runs_code_of(file: str) -> None:
    """Say whose code is about to run. A file that is not there has none."""
    if os.path.isfile(file):
        emit(f"runs code of {file}", sys.stderr)


def call(work: Callable[[], Result], doing: str) -> Result:
    """Run something of the api, with a sign of life; what it prints goes to stderr, so that stdout is the answer."""
    try:
        with stdout_aside(), progress(doing):
            return work()
    except SystemExit as error:
        raise InternalError(f"something left with sys.exit({error.code!r}) instead of answering") from error
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError("torch is not installed", "pip install 'torch>=2.11'") from error


@contextlib.contextmanager
def stdout_aside() -> Iterator[None]:
    """Send what models, libraries and their child processes print to stderr."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a closed stdout or stderr: nothing to protect
        saved = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


class Doing(str):
    """What is being done, as it changes: the sign of life prints it anew each time."""

    now = ""

    def __format__(self, spec: str) -> str:
        return f"{self!s}: {self.now}" if self.now else str(self)

    def tell(self, now: str) -> None:
        self.now = now


@contextlib.contextmanager
def progress(doing: str, after_seconds: float = 1.0) -> Iterator[None]:
    """`tracing llama3-8b … 3 s` on a terminal's stderr while the work takes more than a second."""
    if not (sys.stderr.isatty() and speaks()) or os.environ.get("TERM") == "dumb":
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_spin, args=(done, doing, after_seconds, sys.stderr), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _spin(done: threading.Event, doing: str, after_seconds: float, stream: TextIO) -> None:
    frames = "|/-\\" if ascii_only(stream) else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    start, turn = time.monotonic(), 0
    if done.wait(after_seconds):
        return
    while not done.is_set():
        line = f"{frames[turn % len(frames)]} {doing} … {time.monotonic() - start:.0f} s"
        stream.write("\r" + encodable(line, stream)[: width() - 1] + "\x1b[K")
        stream.flush()
        turn += 1
        done.wait(0.1)
    stream.write("\r\x1b[K")
    stream.flush()
