"""Environments of Gymnasium: episode starts, snapshots of the complete state, and pools that step many environments."""
