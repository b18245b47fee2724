"""Priced programs in, answers out: what is alive when, what runs when, and what a step costs.

    program of a rank ─► memory/   replayed through PyTorch's caching allocator: peaks, owners, a verdict
                      ─► time/     every op on its stream, ranks of a pipeline waiting for each other: seconds
                      ─► offload/  what comes and goes beside the step: states, weights, activations
                      ─► whole     throughput, MFU, joules, money, the whole run

`plan.predict_plan` is the one way in: every command's numbers come from it. `parts` has the types of its answer.
"""
