"""What people and programs read: text on a `terminal`, `html` pages, JSON by a `schema`.

    terminal.screen.render(prediction, 80)      → at most 30 lines of text
    schema.answer(prediction)          → the JSON of an answer
    schema.failure(kind, message, …)   → the JSON of a failure
    schema.load()                      → the JSON schema of both

Nothing here imports torch.
"""
