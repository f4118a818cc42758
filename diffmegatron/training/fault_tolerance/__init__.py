"""What keeps a run from going wrong unseen: signals, watchdog, lock, dumps of bad steps."""
