"""Hugging Face causal language models: loading, hidden states of completions, log-probs, and merged weights."""
