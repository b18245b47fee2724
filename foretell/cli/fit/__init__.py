"""`foretell fit` and `foretell plan advise`."""
