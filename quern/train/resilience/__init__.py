"""What a run notices about itself, and what it does then."""
