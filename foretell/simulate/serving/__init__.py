"""What a server does with requests, as plain data: pages of a KV cache, the scheduler, the load, and a clock over them.

    Load ─► requests ─► Scheduler ─► a step: rows (sequence, first token, tokens) ─► seconds     simulated here
                          │  Pages                                              └─► tokens       run by `serve`
                          └◄──────────────── done(step): what was computed, what is finished

The engine that serves and the simulator that foretells it hold the same scheduler object. No torch, no clock of its own, no
randomness but a load's own seed. Begin with `scheduler`.
"""
