"""What PostgreSQL does in one statement, where other databases need several.

Each of these statements is built once: to build one with SQLAlchemy costs more than to run it. What
changes, and what the journal says of it, are parts of the same statement (``WITH ... INSERT``), so
it needs no transaction around it.
"""
