"""The user's code in a process of its own, on the device it asks for.

    child ─► server ── fork ──► process ─► the user's code
               devices: what it sees of `torch.cuda`     wrappers: torch.compile, DDP, DataLoader
               blame: its errors, with file and line      user_code: whose code may run
"""
