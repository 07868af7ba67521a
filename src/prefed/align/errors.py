"""What goes wrong in an alignment."""


class AlignError(ValueError):
    """An alignment cannot go on; the message names the stage or the file and says what to do."""
