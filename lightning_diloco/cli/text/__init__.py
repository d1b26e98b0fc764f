"""Text for people: quantities, nearest spellings, and what is safe for a terminal."""
