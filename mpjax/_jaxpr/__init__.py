"""Reading jaxprs and running them, and the table of primitives."""
