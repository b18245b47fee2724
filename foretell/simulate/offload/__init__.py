"""What comes and goes beside a step: `copies` puts those of activations on its timeline, `timing` plays those of states and
weights beside it, step after step until steps are alike."""
