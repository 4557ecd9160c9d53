"""Matrix products of linear layers: in FP8 (scales, casts, kernels, their emulation), with kept weights, added up."""
