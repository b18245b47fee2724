"""Parallelism from outside the model: `apply` puts a plan on a module, `runners` run a step of it, `shard` is FSDP2,
one folder for each other axis."""
