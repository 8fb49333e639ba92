"""What other frameworks need to be told about sharded models. Each module imports its framework when it is called."""
