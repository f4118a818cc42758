"""What a run does beside its steps, each in a hook of its own; own_hooks.py has their order."""
