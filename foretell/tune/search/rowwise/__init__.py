"""Row-wise ops as programs, and programs as text.

    trace of aten ops ──lowering.py──► RowProgram ──derive.py──► with its backward ──torch_text.py, triton_text.py──► a candidate file

Norms, softmax, activations, gates and what is chained of them: everything pointwise, and sums and maxima along the last dim.
"""
