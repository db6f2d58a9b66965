"""Environments of other packages, as environments of conversations. Each module needs its package only when it is used."""
