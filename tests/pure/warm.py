"""foretell's command line in a process of its own, forked from one that has imported it: Python starts once, not each time.

Every call has its own environment, streams and exit status, as if `python -m foretell` had been started. Where how Python
itself starts is what a test is about (encodings, closed pipes, what is imported, how long it takes), start Python.
"""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_PARENT = """
import contextlib, io, json, os, sys
import rich.console, rich.text
import foretell.cli, foretell.quantities, foretell.report.terminal.screen
from foretell.hardware.lookup import find_profile
from tests import forks

forks.install()
forks.collect_seldom()

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for words in (["fit", "nope", "--on", "H100"], ["fit", "gpt2", "--on", "H10", "--json"]):
        assert foretell.cli.main(words) == 2  # whatever a command imports is there then
find_profile("H200-SXM-141GB")  # and what predictions read

def become(call):
    os.environ.clear()
    os.environ.update(call["env"])
    os.chdir(call["cwd"])
    for number, path, how in ((0, os.devnull, os.O_RDONLY), (1, call["out"], os.O_WRONLY), (2, call["err"], os.O_WRONLY)):
        os.dup2(os.open(path, how), number)
    sys.argv = ["foretell", *call["words"]]

for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if child == 0:
        become(call)
        status = 0
        try:
            exec(call["code"], {"__name__": "__main__"})
        except SystemExit as ended:
            status = ended.code or 0
        sys.stdout.flush()
        os._exit(status)  # taking the interpreter apart takes longer than most commands
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _parent() -> subprocess.Popen[str]:
    found = subprocess.Popen(
        [sys.executable, "-c", _PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(found.kill)
    return found


def run(*words: str, env: Mapping[str, str], code: str = "") -> subprocess.CompletedProcess[str]:
    """`foretell WORDS`, or the program `code` with these words."""
    parent = _parent()
    assert parent.stdin is not None and parent.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        err.touch()
        known = code or "from foretell.cli import main; sys.exit(main())"
        call = {"words": words, "env": dict(env), "cwd": str(ROOT), "out": str(out), "err": str(err), "code": f"import sys\n{known}"}
        print(json.dumps(call), file=parent.stdin, flush=True)
        status = int(parent.stdout.readline())
        return subprocess.CompletedProcess(list(words), status, out.read_text(), err.read_text())
