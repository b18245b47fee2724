"""How to split a model over the tensor axis, from the calls of its forward.

    calls of a forward ─► flow: places of all values ─► derive: the best choice
                           weights: how parameters are used
                           rules, products, views: one rule for each family of calls
"""
