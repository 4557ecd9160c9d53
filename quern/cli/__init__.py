"""The command line: parses arguments, calls the packages that do the work, and prints results."""
