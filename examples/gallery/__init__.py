"""One core, eight domains: one file each, to be read from top to bottom."""
