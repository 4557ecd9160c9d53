"""Products of matrices in FP8: scales, casts, kernels and their emulation, and the linear layer made of them."""
