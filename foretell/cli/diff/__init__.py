"""`foretell diff BASE [HEAD] --on HW`: `diff` is the command, `ask` what its words ask, `file` what foretell-diff.toml does."""
