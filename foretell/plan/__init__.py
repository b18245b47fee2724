"""The plan room: how to run a model, as plain data."""
