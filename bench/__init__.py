"""What the README claims, each figure by one command."""
