"""Live view of a run as a web page and as Prometheus metrics."""
