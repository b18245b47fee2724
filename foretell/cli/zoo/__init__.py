"""`foretell zoo`, and what is checked with its models: check, query, fuzz, prove."""
