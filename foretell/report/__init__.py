"""What people and programs read: `terminal` for a terminal, `schema` for JSON.

    screen.render(prediction, 80)      → at most 30 lines of text
    schema.answer(prediction)          → the JSON of an answer
    schema.failure(kind, message, …)   → the JSON of a failure
    schema.load()                      → the JSON schema of both

Nothing here imports torch.
"""
