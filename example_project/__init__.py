"""A small shop that exports the orders of an account: see ``python -m example_project --help``."""
