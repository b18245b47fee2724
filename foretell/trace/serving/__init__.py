"""A causal decoder as a server runs it: tokens of many sequences side by side, keys and values in pages, logits of few rows.

`packed` calls a model as it is and takes its attention over; `programs` traces that for sizes. Begin with `packed`.
"""
