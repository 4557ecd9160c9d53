"""Plans a layout without a device: sizes, costs and requirements."""
