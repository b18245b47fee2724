"""A run whose replicas come and go: one process joins them and keeps all that lasts, the others step and may be lost at any time.

    supervisor      starts all of them, and lost replicas again                       process/supervise/replicas.py
    hub             the weights that a round begins from, log, checkpoints            hub_run.py
    replicas        steps of a slot's own samples, in rounds                          replica_run.py
"""
