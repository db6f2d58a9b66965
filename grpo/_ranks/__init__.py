"""How ranks meet: small messages between all ranks, errors that all ranks raise, and names of ranks that are missing."""
