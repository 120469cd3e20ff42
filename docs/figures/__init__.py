"""The figures of the pages: `python -m docs.figures` draws all, `python -m docs.figures casts` one."""
