"""Publishes what is recorded: claim a batch, commit, publish with confirms, mark, commit."""
