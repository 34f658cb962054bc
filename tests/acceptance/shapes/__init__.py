"""Apps as tutorials, templates and frameworks teach them, with the base class swapped."""
