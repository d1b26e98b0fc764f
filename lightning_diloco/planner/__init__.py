"""Formulas that forecast memory, links and goodput of a run, and whether it fits its machines."""
