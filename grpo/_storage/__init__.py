"""The files of checkpoints: how they are written, verified, replaced and locked. `grpo.checkpoint` is the public side."""
