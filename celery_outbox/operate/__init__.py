"""Looks at everything and owns nothing: status, control, maintenance, the command line."""
