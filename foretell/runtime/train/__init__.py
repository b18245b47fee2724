"""A training run: `loop` is one rank's, `train` everything around it, `save` its state as a checkpoint, `take` the way back, `outcome` how it ends,
`faults` what is done where a step goes wrong; `numbers` are kept sound."""
