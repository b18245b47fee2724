"""What lives elsewhere: `states` (optimizer states and weights on the host or a disk), `activations`, and `timing`, which plays
their copies beside a step. They lower and simulate at once, since what is moved when depends on how fast it goes."""
