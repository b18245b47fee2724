"""Seconds of one op by its shapes: `features` says what kind of kernel it is and what it moves, `laws` and `trees` are what a
profile fits, `ops` asks them; `memory_bound`, `products`, `irregular` and `lines` know single kinds. `scratch` has the bytes that a kernel
takes besides its outputs, `scratch_attention` and `scratch_rnn` those of theirs."""
