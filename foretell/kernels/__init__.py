"""GPU kernels, a file for each op. They import Triton: only what runs on a GPU may import them."""
