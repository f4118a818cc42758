"""Convert a corpus (JSONL, Parquet or plain-text files) to token files for training."""
