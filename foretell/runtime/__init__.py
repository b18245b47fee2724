"""The runtime room: apply a plan to a real module on torch.distributed, train, measure."""
