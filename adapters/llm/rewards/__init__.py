"""Rewards of completions: reward functions, verifiers and GSM8K."""
