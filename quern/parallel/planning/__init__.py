"""What a layout is, costs and needs, counted without a device."""
