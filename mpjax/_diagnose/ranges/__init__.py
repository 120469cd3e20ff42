"""The ranges of all numbers of a function."""
