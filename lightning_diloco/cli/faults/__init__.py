"""What `diloco chaos` does to a run: a schedule of faults, who makes them, and what is told of them."""
