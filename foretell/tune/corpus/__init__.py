"""Kernels that cheat, one for each way that is known (`results`, `times`; further ones in `variants`), kernels that misbehave
(`misbehaving`), and good ones (`good`), each for one of the `tasks`.

The head of a file says its task, the check that must refuse it, what it needs (cuda, triton), and whether the scan of its text
sees it; the loader of the harness reads that. Nothing here is imported: it is run as any kernel is.
"""
