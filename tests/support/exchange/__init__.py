"""Token files of other programs, written plainly."""
