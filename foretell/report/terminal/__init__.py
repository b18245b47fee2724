"""Answers on a terminal: `screen` for `foretell fit`, `front` and `plan` for `foretell plan`,
with `bar` and `seconds` in them; `diff` for `foretell diff`."""
