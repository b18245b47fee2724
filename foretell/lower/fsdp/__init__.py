"""PyTorch's FSDP2: `units` are what is gathered and reduced at once, `weave` writes gathers, copies and reductions around a
micro-batch's ops, `sharded` does so for a whole step and its update."""
