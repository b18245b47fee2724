"""Training software that is predicted and not run: Megatron, DeepSpeed, llm-foundry, ...; what the back-test on published runs needs.

    stacks      what each runs, as data with a source (stacks/*.toml)
    zero        data parallelism that FSDP2 does not have: buckets, ZeRO-1 and 2, reduction after the last backward
    float8      products in 8 bits, with the casts before them
    attention   seconds of attention by a named kernel
    step        seconds of a step, through the lowering, prices and timeline of any plan
    schedule    the stages of a pipeline, played
    memory      bytes of a rank

A plan together with a stack is a `ForeignPlan`; answers carry its mark, "not runnable here".
"""
