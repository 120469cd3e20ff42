"""Reading jaxprs, the table of primitives, and the rewriter that casts."""
