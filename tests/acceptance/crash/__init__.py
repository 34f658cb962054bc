"""The crash matrix: at each boundary, on each broker, a process dies (docs/crash-matrix.rst)."""
