"""Text on the command line: quantities, nearest spellings, and characters that are safe for a terminal."""
