"""The codebase's own rules, kept by programs."""
