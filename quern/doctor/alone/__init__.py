"""What one machine tells about itself, without any other and without torch unless it is asked for."""
