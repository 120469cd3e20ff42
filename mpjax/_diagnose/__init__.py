"""Diagnostics of a function: the precision of operations, the first non-finite value, ranges."""
