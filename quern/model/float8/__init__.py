"""FP8 matrix products: scales, casts, kernels and their emulation, and the linear layer made of them."""
