"""What can go wrong in training."""


class TrainingError(Exception):
    """Training that cannot go on: the message gives the cause, and what to do about it."""
