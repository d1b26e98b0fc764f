"""A run on one page that updates by itself, and as Prometheus metrics."""
