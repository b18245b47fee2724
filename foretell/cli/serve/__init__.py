"""`foretell serve`."""
