"""Conversion between checkpoint formats: Hugging Face, Megatron-LM, and our own."""
