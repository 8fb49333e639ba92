"""Read traces and runs, and show them as tables. Nothing here imports torch."""
