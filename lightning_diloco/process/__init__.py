"""Operating system functions that all processes of a run use: threads, exit codes, memory."""
