"""Every example of README.md, CONTRIBUTING.md and docs/*.md: run against what it shows, or at least parsed.

    $ foretell ...      followed by lines: run, and compared line by line; `…` stands for any text, alone for any lines
    $ python examples/  the same, in a process of its own
    foretell ...        every other command: its options must exist and take the values given
    ```python           run, in the order of the page
    <!-- file: NAME --> before a block: the block is NAME, for the examples below it
    <!-- not run: WHY --> before a block: shown only

A block that is none of these fails. `make docs` writes what the commands print now.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.common import without_script
from tests.kept_traces import with_traces

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
COLUMNS = "100"
ANY = "…"
SHOWN = ("", "text", "console", "sh", "bash")
"""Languages of blocks that hold commands or what they print."""
DATA = ("json", "toml", "yaml")
RUN = ("$ foretell ", "$ python examples/")
"""How a block begins whose commands are run; `examples` is in the folder they run in."""
COMMANDS = re.compile(r"(\$ )?(foretell|make|torchrun|python|pip|uvx|\.ci/run)\b")
MARK = re.compile(r"<!-- (file|not run): (\S.*?) -->")


@dataclass
class Block:
    """A fenced block of a page."""

    page: str
    start: int
    """Number of its first line, from 0: the one below the fence."""
    language: str
    lines: list[str] = field(default_factory=list)
    mark: str = ""
    said: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.start}"


@dataclass
class Example:
    """A command and the lines below it."""

    command: str
    output: list[str]
    start: int
    """Number of the first line of output in its page, from 0."""


def blocks(page: str, text: str) -> list[Block]:
    """All fenced blocks; an unclosed one ends with the page."""
    found: list[Block] = []
    inside, before = False, ""
    for number, line in enumerate(text.splitlines()):
        if line.startswith("```"):
            inside = not inside
            if inside:
                mark = MARK.fullmatch(before.strip())
                found.append(Block(page, number + 1, line[3:].strip(), [], *(mark.groups() if mark else ())))
        elif inside:
            found[-1].lines.append(line)
        before = line
    return found


def examples(block: Block) -> list[Example]:
    """Commands after `$` that have output below them."""
    found: list[Example] = []
    for number, line in enumerate(block.lines):
        if line.startswith("$ "):
            found.append(Example(line[2:], [], block.start + number + 1))
        elif found:
            found[-1].output.append(line.rstrip())
    return [one for one in found if any(one.output)]


def only_commands(block: Block) -> bool:
    return all(not line.strip() or line.startswith("#") or COMMANDS.match(line) for line in block.lines)


def problem(block: Block) -> str:
    """Why a block is neither run, nor parsed, nor marked; empty where it is."""
    if block.mark or block.language in ("python", *DATA):
        return ""
    if block.language not in SHOWN:
        return f"{block}: language {block.language!r} is not one that is checked"
    if examples(block):
        first = next(line for line in block.lines if line.strip())
        return "" if first.startswith(RUN) else f"{block}: output before the first `$ foretell` line"
    return "" if only_commands(block) else f"{block}: shows more than commands; begin with `$ foretell ...`, or mark it <!-- not run: WHY -->"


def matches(output: Sequence[str], shown: Sequence[str]) -> bool:
    """Whether these lines were printed, where `…` in a line is any text and alone any lines."""
    parts = [".*(?:\n.*)*" if line == ANY else re.escape(line).replace(ANY, ".*") for line in _trimmed(shown)]
    return re.fullmatch("\n".join(parts), "\n".join(_trimmed(output))) is not None


def _trimmed(lines: Sequence[str]) -> list[str]:
    return "\n".join(line.rstrip() for line in lines).strip("\n").split("\n")


def rewritten(output: Sequence[str], shown: Sequence[str]) -> list[str]:
    """What to show: the lines printed, left out where they were left out before."""
    new, old = _trimmed(output), _trimmed(shown)
    if ANY not in old:
        return new
    head, tail = old.index(ANY), old[::-1].index(ANY)
    return [*new[:head], ANY, *new[len(new) - tail :]] if head + tail < len(new) else new


# ---------------------------------------------------------------------------------------------- commands


def commands(text: str) -> Iterator[str]:
    """Lines of fenced and indented blocks that call foretell."""
    inside, joined = False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif inside or line.startswith("    "):
            line = joined + line.strip().removeprefix("$ ")
            joined = line[:-1] if line.endswith("\\") and line.startswith("foretell ") else ""
            if line.startswith("foretell ") and not joined:
                yield line


def mentions(text: str) -> Iterator[str]:
    """`foretell ...` in a sentence."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for found in re.finditer(r"`(foretell [^`]+)`", plain):
        yield " ".join(found[1].split())


@functools.cache
def every_command() -> Any:
    """With all options: making them takes longer than reading a page."""
    import typer

    from foretell.cli.app import made

    return typer.main.get_command(made())


def resolved(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and the words that are left for it."""
    from foretell.cli.names import joined

    command, rest = every_command(), joined(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest


def wrong_in_command(line: str) -> str:
    """What the command line says of this command before it does anything; empty if nothing."""
    command, rest = resolved(without_script(shlex.split(line, comments=True)[1:]))
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        return f"there is no command {rest[0]!r}"
    try:
        command.make_context(command.name or "foretell", rest, resilient_parsing=False)
    except Exception as error:
        message = getattr(error, "format_message", None)
        return message() if message else f"{type(error).__name__}: {error}" if str(error) else ""
    return ""


def wrong_in_mention(line: str) -> str:
    """A command or option in a sentence that does not exist. Values are often placeholders, and not looked at."""
    command, rest = resolved(without_script([word for word in line.split()[1:] if word not in ("...", ANY)]))
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help", "-h", "--version"}
    missing = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    if hasattr(command, "commands") and rest and re.fullmatch("[a-z]+", rest[0]):
        missing.insert(0, rest[0])
    return f"{', '.join(missing)} of `{line}` does not exist" if missing else ""


def printed(command: str) -> list[str]:
    """What a command prints, run in this process; complaints come with it. A Python file has a process of its own."""
    from foretell.cli import main

    if command.startswith("python "):
        around = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *shlex.split(command)[1:]], env=around, capture_output=True, text=True)
        return (done.stdout if done.returncode == 0 else done.stdout + done.stderr).splitlines()
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(shlex.split(command, comments=True)[1:])
    text = out.getvalue() if status in (0, 1) and out.getvalue() else out.getvalue() + errors.getvalue()
    return text.splitlines()


def played(page: str, text: str) -> Iterator[tuple[Block, Example, list[str]]]:
    """Write the page's files, run its Python and its examples, in order, in the present folder."""
    if "examples/" in text:
        Path("examples").symlink_to(ROOT / "examples")
    scope: dict[str, Any] = {"__name__": "example"}
    for block in blocks(page, text):
        if block.mark == "file":
            sys.modules.pop(Path(block.said).stem, None)  # another page's, if it has one
            Path(block.said).write_text("\n".join(block.lines) + "\n")
        elif block.mark == "not run":
            continue
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("\n".join(block.lines), str(block), "exec"), scope)
        elif block.language in SHOWN:
            for one in examples(block):
                yield block, one, printed(one.command)


def wanted(cache: Path) -> dict[str, str]:
    """What is around an example; how many gains are found in a few seconds differs from machine to machine, and none is shown."""
    return {"COLUMNS": COLUMNS, "NO_COLOR": "1", "FORETELL_CACHE": str(cache), "FORETELL_DEBUG": "0", "FORETELL_FASTER_SECONDS": "0"}


# ---------------------------------------------------------------------------------------------- tests

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
QUESTIONS = "docs/questions.md"
"""Run and compared by test_questions.py, which checks its answers as well."""
TO_WRITE = [page for page, text in TEXTS.items()
            if any(not one.mark and (one.language == "python" or examples(one)) for one in blocks(page, text))]  # fmt: skip
TO_RUN = [page for page in TO_WRITE if page != QUESTIONS]
LONG = {
    "docs/advise.md": "a minute of searches; test_remedies.py asks again what advice prints",
    "docs/examples.md": "minutes of examples; what each prints of a prediction is on the pages that run",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_traces(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow(reason=LONG[page])] if page in LONG else []) for page in TO_RUN]
)
def test_examples_print_what_the_page_shows(page: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in wanted(cache).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for _, one, output in played(page, TEXTS[page]):
        shown = "\n".join(_trimmed(one.output))
        assert matches(output, one.output), f"{page}:{one.start}: `make docs` would mend it\n--- shown\n{shown}\n--- printed\n" + "\n".join(output)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_parsed_or_marked(page: str) -> None:
    assert [said for block in blocks(page, TEXTS[page]) if (said := problem(block))] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_parses(page: str) -> None:
    assert {line: said for line in commands(TEXTS[page]) if (said := wrong_in_command(line))} == {}


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_have_the_options_named(page: str) -> None:
    assert [said for line in mentions(TEXTS[page]) if (said := wrong_in_mention(line))] == []


def test_the_headline_is_run() -> None:
    assert "README.md" in TO_RUN
    told = [one.command for block in blocks("README.md", TEXTS["README.md"]) if not block.mark for one in examples(block)]
    assert any(command.startswith("foretell fit ") for command in told)


# ---------------------------------------------------------------------------------------------- the checks themselves


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("foretell fit gpt2 --on H100 --sequence 8", "--sequence"), ("foretell fitt gpt2", "fitt"),
        ("foretell fit gpt2 --on H100 --seq long", "--seq"), ("foretell ckpt lst runs/NAME", "lst"),
        ("foretell fit gpt2 --on H100 --seq 8  # it's fine", ""), ("foretell zoo --task seg", ""),
        ("foretell zoo query --task seg --json", ""), ("foretell eject", "PLAN"),
    ],
)  # fmt: skip
def test_a_command_that_is_not_one_is_seen(line: str, said: str) -> None:
    found = wrong_in_command(line)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("line", "said"),
    [("foretell run RUN --resumed", "--resumed"), ("foretell runn PLAN", "runn"), ("foretell plan MODEL --on HW --seq S", "")],
)
def test_an_option_in_a_sentence_that_is_not_one_is_seen(line: str, said: str) -> None:
    found = wrong_in_mention(line)
    assert said in found and bool(said) == bool(found)


def test_a_screen_without_its_command_is_seen() -> None:
    page = "```\nTIGHT  gpt2\n```\n<!-- not run: measured elsewhere -->\n```\nTIGHT\n```\n```\nforetell zoo\n```\n```\nFITS\n$ foretell zoo\nx\n```\n"
    told = [problem(block) for block in blocks("page", page)]
    assert [bool(one) for one in told] == [True, False, False, True]
    assert "page:1" in told[0] and "not run" in told[0]
    assert problem(blocks("page", "<!-- not run: -->\n```\nTIGHT\n```")[0]), "a mark without a reason is none"


def test_lines_are_compared_and_dots_stand_for_anything() -> None:
    shown = ["TIGHT  76.7 of 79.1 GiB", ANY, "took … s", ""]
    assert matches(["TIGHT  76.7 of 79.1 GiB", "a", "", "b", "took 3 s"], shown)
    assert not matches(["TIGHT  76.8 of 79.1 GiB", "a", "took 3 s"], shown)
    assert not matches(["TIGHT  76.7 of 79.1 GiB", "a", "took 3 s", "more"], shown)
    assert rewritten(["FITS", "a", "b", "took 4 s"], shown) == ["FITS", ANY, "took 4 s"]
    assert matches(rewritten(["x", "y"], ["old"]), ["x", "y"])


def test_writing_mends_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\n```\n$ foretell version\nforetell 0.0.0\nmore\n```\nb\n```\n$ foretell version\nforetell …\n```\n"
    monkeypatch.chdir(tmp_path)
    new = mended("page", text)
    assert new.startswith("a\n```\n$ foretell version\nforetell ") and "0.0.0" not in new and "\nmore" not in new
    assert new.endswith("```\nb\n```\n$ foretell version\nforetell …\n```\n") and mended("page", new) == new


# ---------------------------------------------------------------------------------------------- writing


def mended(page: str, text: str) -> str:
    """The page with what its commands print now; what still matches stays as it is."""
    lines, grown = text.split("\n"), 0
    for _, one, output in played(page, text):
        if not matches(output, one.output):
            new = rewritten(output, one.output)
            lines[one.start + grown : one.start + grown + len(one.output)] = new
            grown += len(new) - len(one.output)
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    if list(words) != ["--write"]:
        print("python -m tests.pure.test_docs --write    writes what the examples print now", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(wanted(Path(folder) / "cache"))
        for page in TO_WRITE:
            place = Path(folder) / page
            place.mkdir(parents=True)
            os.chdir(place)
            sys.path.insert(0, str(place))
            new = mended(page, TEXTS[page])
            sys.path.remove(str(place))
            print(f"{page}: {'as it was' if new == TEXTS[page] else 'written'}")
            (ROOT / page).write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
