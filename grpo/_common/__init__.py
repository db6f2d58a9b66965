"""What every room uses: settings, checks and conversions of arguments, and the state of random generators."""
