"""Which call reads what: `record` watches a forward, `calls` holds it, `stages` and `logits` are read off it."""
