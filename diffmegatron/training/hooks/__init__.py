"""What a run does beside its steps, each in a hook of its own; builtin_hooks.py has their order."""
