"""The demonstration: one export without trouble, then four failures by killing real processes."""
