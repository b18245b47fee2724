"""Training software that is predicted and not run: Megatron, DeepSpeed, llm-foundry, ...

    stacks      what each runs, as data with a source (stacks/*.toml)
    zero        data parallelism that FSDP2 does not have: buckets, ZeRO-1 and 2, reduction after the last backward
    float8      products in 8 bits, with the casts before them

A plan together with a stack is a `ForeignPlan`; answers carry its mark, "not runnable here".
"""
