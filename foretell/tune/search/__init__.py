"""Search for a faster kernel without any model that writes code: templates × configurations, each verified and timed.

    task ── trace ──► rowwise: templates (`templates.py`) ── config (`space.py`, `evolve.py`: pure) ──► text of a candidate
                                         ▲                                                                │
                                         └───────── seconds, refused, pruned (`trial.py`) ◄───────────────┘  `kept.py`: rows as they come
"""
