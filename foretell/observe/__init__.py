"""A script of the user's, run for real: predicted beside measured while it runs, what drifts, and why memory ran out.

    cli/watch ─► session ── starts ─►  python train.py   (runtime/observe: hooks in its process)
                    │  ◄── readings ──  a JSON line at a time
                    ├─► search/followed, script_ways    what was predicted; what would have made it fit
                    ├─► lines, out_of_memory            words on stderr
                    └─► record                          a run folder that `foretell compare` and `report` read

`inside` is the same from within a loop of the user's: `with foretell.watch(model, optimizer)`.
"""
