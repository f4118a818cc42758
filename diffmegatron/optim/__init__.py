"""ZeRO engine, AdamW, Muon, reduction of gradients, learning-rate schedule, and guard of steps."""
