"""A training run: `loop` is one rank's, `train` everything around it, `save` its state as a checkpoint, `take` the way back, `outcome` how it ends,
`finite` and `guard` keep numbers sound."""
