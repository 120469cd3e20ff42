"""What each rounding does to the result."""
