"""Private servers for the tests: one file for each kind, found or installed by ``install``."""
