"""The network, independent of devices and layouts."""
