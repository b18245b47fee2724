"""Optimizer states, weights and activations in host memory, and brought to the device just in time."""
