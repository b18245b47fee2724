"""Parallelism from outside the model: `apply` puts a plan on a module, `shard` is FSDP2, one folder for each other axis."""
