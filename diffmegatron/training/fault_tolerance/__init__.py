"""Fault tolerance: stop signals, watchdog, run lock and reports of anomalous steps."""
