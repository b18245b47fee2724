"""The output layer and the cross entropy of a model over one chunk of the tokens after another: the logits of a single chunk
exist at a time. The step that is traced and the one that is run are made by the same code.

    deferred.py  logits that are not computed until a loss asks for them, put in the place of the model's own from outside
    loss.py      the loss of chunks, with its gradients by hand
"""
