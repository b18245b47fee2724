"""How fast a kernel is beside its baselines. `statistics.py` is pure; `measure.py` asks processes and reads the parent's clock;
`baselines.py` says what a kernel has to beat.
"""
