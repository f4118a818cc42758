"""Transformer layers for Megatron-core: self-attention, layer specs, LoRA, rotary embedding."""
