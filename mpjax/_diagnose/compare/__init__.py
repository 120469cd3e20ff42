"""Low precision against float32, module by module."""
