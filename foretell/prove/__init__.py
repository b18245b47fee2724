"""Sealed forecasts: draw configurations from a public seed, predict them, seal that with a hash, run them, publish all.

    seed ─► draw ─► forecast ─► seal (a file and its SHA-256)  ─► run, each in a process of its own ─► rows, misses first
             pure     traces on fake tensors, no device touched       at the edge

Nothing of the device but its name is asked before the seal. On a CPU, whose speed depends on who else uses it, the pace of
other models is taken beside every row, and seconds are held at that pace.
"""
