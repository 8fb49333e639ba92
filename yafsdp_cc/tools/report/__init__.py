"""Read traces and runs, and show them on one page of HTML. Nothing here imports torch."""
