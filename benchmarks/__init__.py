"""How fast celery-outbox is beside its peers: ``python -m benchmarks``.

Times drift, so every figure is a ratio of two contenders that were measured in turn, in one run.
"""
