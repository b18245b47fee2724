"""A training run: `loop` is one rank's, `train` everything around it, `save` its state as a checkpoint, `take` the way back, `outcome` how it ends,
`halve` what is done where device memory runs out; `numbers` are kept sound."""
