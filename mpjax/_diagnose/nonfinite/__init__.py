"""The first inf or NaN."""
