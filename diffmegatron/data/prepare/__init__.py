"""From corpus files to tokens on disk."""
