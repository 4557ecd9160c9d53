"""Commands about configs: the reference of their keys, and starting configs."""
