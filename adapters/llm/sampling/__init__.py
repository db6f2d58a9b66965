"""Samplers, which draw completions: batched decoding with the model itself, and vLLM."""
