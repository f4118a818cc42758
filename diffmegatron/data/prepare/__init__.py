"""Convert corpus files to tokens on disk."""
