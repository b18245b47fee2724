"""Triton kernels and how they are launched. Only for a GPU, or for Triton's interpreter (TRITON_INTERPRET=1)."""
