"""Bridges: environments of other packages in conversations. Each module needs its package only when it is used."""
