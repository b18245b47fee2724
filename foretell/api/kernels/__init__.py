"""Kernels: searched for by templates, or written by a language model. `search`."""
