"""Optimizer wrappers."""
