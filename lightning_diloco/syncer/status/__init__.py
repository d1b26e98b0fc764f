"""What a run looks like at any moment, and how it came to it."""
