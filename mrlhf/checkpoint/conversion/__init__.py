"""From one checkpoint format to another: Hugging Face, Megatron-LM, and our own."""
