"""Checkpoints, arrays by name, conversion for inference and its report."""
