"""Protection against faults: signals, watchdog, run lock, dumps of anomalous steps."""
