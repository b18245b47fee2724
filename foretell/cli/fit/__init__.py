"""`foretell fit` and `foretell advise`."""
