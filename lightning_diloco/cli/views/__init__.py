"""Printed forms of forecasts."""
