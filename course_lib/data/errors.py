"""What can be wrong with data: two errors, each of which says what to do."""


class DataError(ValueError):
    """Data that must not be trained on. The message names the file and, where it can, the byte."""


class CorpusUnavailable(RuntimeError):
    """A corpus that cannot be had here. The message says why, and what to do instead."""
