"""Reading jaxprs, and the table of primitives."""
