"""Kernels written by a language model, through the same gate as any other: verified and timed here, whatever it says of them.

    talk.py ── endpoint.py (HTTP), command.py (a program) ── budget.py (minutes, money) ── transcript.py (recorded, replayed exactly)
    rounds.py    strategy ──► code ──► gym.py: verified, timed ──► judge ──► the next round; each way can be left out (`ways.py`)
    memory.py    what worked, by backend     curate.py  transcripts as a data set     score.py  transcripts as figures
    workflow.py  a recorded workflow whose choices an optimizer improves
"""
