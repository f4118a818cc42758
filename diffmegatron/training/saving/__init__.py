"""What a run keeps of itself: saving, and going on from what was saved."""
