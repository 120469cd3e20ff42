"""Errors, trees, leaves and types, on which all other folders are built."""
