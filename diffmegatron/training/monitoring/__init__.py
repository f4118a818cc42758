"""What a run says of itself: metrics, progress, time per phase, held-out measures."""
