"""Watch a script that somebody else wrote, from inside its own process.

    boot/sitecustomize   Python imports it before the script; it waits until the script imports torch
      └► hooks           where steps end, what waits for data, peaks of memory, what an out-of-memory error looked like
           └► channel: one JSON object a line ──► `foretell.observe`, in the process that started the script

`boot`, `hooks`, `channel` and `process_state` need the standard library and torch alone: they are loaded
by path into whatever Python runs the script.
"""
