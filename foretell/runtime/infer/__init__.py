"""One forward over several devices, a stage on each: what `plan --infer` splits, run.

    caller ─TCP─► stage 0 ─tcp or gloo─► stage 1 ─ ... ─► last stage ─TCP─► caller

`stage` makes a process's part of the model, `links` are what tensors travel over, `worker` is a stage's process, `pipeline` starts
them and gives them requests. Begin with `pipeline`.
"""
