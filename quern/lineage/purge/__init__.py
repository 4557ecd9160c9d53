"""Documents taken out of a data run for good: chosen, condemned with all that hangs on them, removed, remembered."""
