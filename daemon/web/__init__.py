"""The metrics port: Prometheus, probes and the page that people look at."""
