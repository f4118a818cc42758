"""ZeRO engine, AdamW, reduction of gradients, learning-rate schedule, and guard of steps."""
