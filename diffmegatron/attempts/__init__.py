"""What a job leaves of each of its starts, and what becomes of it: requeued, or ended."""
