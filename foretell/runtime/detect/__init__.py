"""Who is slow, stuck or different: every collective of every rank is recorded, and read while the run goes and after it died.

    recorder ── enter, wait, exit of every collective ──►  ring      a file in memory and in the run folder, of fixed size
       ▲                                                     │
    progress ── phases and steps                             ├─► records    rings of all ranks, read and checked
                                                             │      ├─► slow, links    slow ranks and slow links (pure)
                                                             │      └─► hangs          who waits for whom, and for what (pure)
                                                             └─► detector   on rank 0, once a second: findings → screen, log, report

Where a rank is in each group travels with its report of itself as well, so that whoever judges a hang (`runtime/process/blame.py`) has it
without a file. `observer` is what a run has of all this. Only that, `recorder` and `replicas` need torch.
"""
