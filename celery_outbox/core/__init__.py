"""Pure decisions: states, transitions, retry policy, error classification.

Nothing here touches SQL, Celery or a clock; ``now`` and randomness are arguments.
"""
