"""Two revisions of a user's repository, side by side: `bounds` on growth, what they `judge`, and `markdown` for a pull request.

    compared(asked, base, head, bounds)   → ModelDiff       one model on one kind of hardware, two predictions
    RevisionDiff.status                   → 0 within the bounds, 1 grown beyond one, 2 a revision that cannot be traced
    markdown.render(found)                → a table, and what grew, folded

The table on a terminal is `terminal.diff`. Nothing here imports torch.
"""
