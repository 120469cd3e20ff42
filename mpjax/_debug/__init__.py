"""Showing what a function does: precision of each operation, first non-finite value, ranges."""
