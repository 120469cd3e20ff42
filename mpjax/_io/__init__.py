"""Checkpoints, arrays by name, conversion for inference."""
