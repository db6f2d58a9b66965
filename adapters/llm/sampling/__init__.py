"""Samplers of completions: batched decoding with the trained model itself, and vLLM."""
