"""Mixed precision for any JAX function: a dtype for each operation."""
