"""The command line.  `cli.main` is its root; one module for each family of commands."""
