"""Acceptance tests: real processes, looked at through database, broker and files."""
