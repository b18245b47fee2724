"""A plan applied to a trace: the program that each kind of rank runs. Trace in, trace out; plain data, no torch.

    traces of one device, one for each kind of recompute
      ▼ blocks      every block its own recompute
      ▼ steps       so many micro-batches a step
      ▼ compiling   blocks or the whole model under torch.compile
      ▼ pipeline/   the stages of each rank and its schedule
      ▼ fsdp/       what fully_shard gathers, scatters and sums around them
      ▼ offload/    what leaves the device, and when: states, weights, activations
      the program of a rank

Beside them: `batch` (a trace at another micro-batch), `tensor`, `context` and `expert` (what ranks that share a layer, a
sequence or experts need besides). Each follows what `runtime` does to the real model, in the same order; tests hold the two
equal by dry runs of PyTorch's own APIs. Start with `blocks`, then `fsdp`.
"""
