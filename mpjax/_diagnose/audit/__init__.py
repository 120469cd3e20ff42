"""What runs in which dtype."""
