"""`find_nonfinite`: where the first inf or NaN came from."""
