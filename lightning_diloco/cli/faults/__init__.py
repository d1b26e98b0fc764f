"""The parts of `diloco chaos`: a schedule of faults, their injection into a run, and the report."""
