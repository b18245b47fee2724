"""A model from wherever the user has it: `model` finds it, `userfile` takes one of the user's own, `module` one that is
already built."""
