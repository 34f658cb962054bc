"""Tests against real databases, brokers and workers."""
