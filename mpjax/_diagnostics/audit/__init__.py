"""`audit`: which precision each operation of a function has, and what brought float32 in."""
