"""Commands under commands: `foretell plan show` is one command, and so are older spellings of it. No torch.

    fit  plan  run  serve  tune  watch  verify  compare  report  probe  hardware  zoo  doctor
          │     │     │      │                      │                              │
      show   demo  bench  verify              prove, diff                check, query, fuzz
     export   box         serve
     export    box
      eject   supervise
     advise   chaos
              ckpt
"""

from __future__ import annotations

from collections.abc import Sequence

UNDER = {
    "show": "plan show", "export": "plan export", "eject": "plan eject", "advise": "plan advise", "box": "run box", "ckpt": "run ckpt",
    "demo": "run demo", "prove": "compare prove", "fuzz": "zoo fuzz",
}  # fmt: skip
"""Old spelling → what it is called now; old ones work for one more version."""
SHORT = {"diff": "compare diff", "supervise": "run supervise", "chaos": "run chaos", "bench": "serve bench"}
"""Short spelling → the command; both stay."""
LONG = ("tune search", "tune verify", "tune serve")
"""Without a short spelling."""


def joined(words: Sequence[str]) -> list[str]:
    """Two words that name one command as one."""
    known = UNDER | SHORT
    if words and words[0] in known:
        return [known[words[0]], *words[1:]]
    both = " ".join(words[:2])
    return [both, *words[2:]] if both in known.values() or both in LONG else list(words)


def note(words: Sequence[str]) -> str:
    """What to say of an old spelling; empty for others."""
    new = UNDER.get(words[0], "") if words else ""
    return f"`foretell {words[0]}` is now `foretell {new}`; the old spelling goes with the next version" if new else ""


def below(command: str) -> str:
    """For the end of a command's help: those under it."""
    names = [name for name in (*UNDER.values(), *SHORT.values(), *LONG) if name.split()[0] == command]
    return f"Under it: {', '.join(f'foretell {name}' for name in names)}." if names else ""
