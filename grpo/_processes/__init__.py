"""A forked process that makes calls for this one, and can be killed with all that it started."""
