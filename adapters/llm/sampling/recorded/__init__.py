"""Sampling by steps of fixed shape, which a GPU records once and replays."""
