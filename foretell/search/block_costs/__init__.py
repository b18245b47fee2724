"""What one block of each kind costs on one kind of device, at any micro-batch, split and residency; `sheet` is where to start, `kept` the cache."""
