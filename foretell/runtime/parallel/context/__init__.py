"""Context parallelism: every rank has some `positions` of every sample; attention and losses are `special`, the rest is `exchange`."""
