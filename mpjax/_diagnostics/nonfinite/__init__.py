"""Finding the first value of a function that is not finite."""
