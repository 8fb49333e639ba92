"""Adapters for other frameworks. Each module imports its framework when it is called."""
