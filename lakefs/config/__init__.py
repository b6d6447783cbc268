"""Settings: one file, variables and flags, parsed once."""
