"""Follow a training script, as it is, through its first step on fake tensors.

    words ──► child: world (a device, real data, no traces left) ──► follow (where in a step the script is) ──► Trace
              python train.py --batch-size 64                        module called, backward, step

`words` reads the command line, `child` is the process that runs the script, `capture` runs it once, `follow` records it, `world` is what the
script finds around it and `writes` keeps its files apart. Start with `follow`.
"""
