"""Leave with a script: a plan as plain PyTorch that a person can read, and that needs nothing of foretell."""
