"""Rules for an error that the user allows."""
