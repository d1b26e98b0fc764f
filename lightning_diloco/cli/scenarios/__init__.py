"""Scenarios of `diloco simulate`: their options, their files, and the rows of a forecast."""
