"""The plan room: how to run a model, as plain data. `types` has it, `legal` says what it may say, with `facts` of model and hardware."""
