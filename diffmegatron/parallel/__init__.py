"""Where this rank is among the others: `parallel_state.py` has the process groups."""
