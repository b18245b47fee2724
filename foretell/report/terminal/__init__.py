"""Answers on a terminal: `screen` for `fit`, `front` and `plan` for `plan`, with `bar` and `seconds` in them."""
