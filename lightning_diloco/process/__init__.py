"""What every process of a run needs of its operating system: threads, exit codes, memory."""
