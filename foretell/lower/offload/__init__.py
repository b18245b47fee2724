"""A step part of which lives elsewhere: `states` (optimizer states and weights on the host or a disk), `activations` (what blocks
keep for backward). Each puts marks into a rank's program where something leaves, comes back or is waited for, and says what
memory is free meanwhile; how long that takes is for `price.offload` and `simulate.offload`."""
