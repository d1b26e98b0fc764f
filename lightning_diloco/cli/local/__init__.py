"""A fleet on one machine: its processes, their output and their end."""
