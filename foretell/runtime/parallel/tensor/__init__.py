"""Tensor parallelism: `split` divides parameters, `values` are tensors of which a rank has a part, `exchange` is what ranks send."""
