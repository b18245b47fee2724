"""Seconds of messages between devices: `collectives` by size, algorithm and link; `overlap` beside compute."""
