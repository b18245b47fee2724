"""A training run: `loop` is one rank's, `train` everything around it, `save` its state, `finite` and `guard` keep numbers sound."""
