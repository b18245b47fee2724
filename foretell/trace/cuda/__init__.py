"""What CUDA would run where a CPU runs something else: `select` has the table, `attention`, `norm` and `rnn` the ops, `autocast` and `tf32` the
formats, `versions` what differs between releases of torch."""
