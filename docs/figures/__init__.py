"""The figures of the pages: `python -m docs.figures` draws them."""
