"""A soak: thousands of jobs of every kind while everything around them is killed at random."""
