"""What the numbers of a function look like: exponents of values, and updates that are lost."""
