"""Optimizer states, weights and activations in host memory, and brought to the device just in time: `adamw` is the optimizer whose
states are elsewhere, `chunk_updates` one step of it, `weights` streams parameters, `saved` moves activations."""
