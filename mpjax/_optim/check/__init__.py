"""The check that a skipped step keeps everything."""
