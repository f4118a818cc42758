"""Convert text files (JSONL, Parquet, plain text) to token files for training."""
