"""A model from wherever the user has it: `model` finds it, `module` takes one that is already built, `adapters` puts LoRA on it."""
