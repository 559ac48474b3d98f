"""End a check whose code never comes to an end: most learners write an endless loop once."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

LIMIT_S = 120.0  # the longest check computes for about a tenth of it on a laptop


class TookTooLong(BaseException):
    """Raised inside the code that did not finish. No `except Exception` of a learner stops it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the block once this thread has computed for `seconds`.

    A busy machine makes nobody's code wrong, so waiting counts only a fifth: for ranks, which have
    limits of their own, or in a sleep. Without SIGALRM (Windows), or off the main thread, where
    Python runs no signal handler, there is no limit.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if not (hasattr(signal, "setitimer") and on_main):
        yield
        return
    began, computed = time.monotonic(), time.thread_time()

    def look(*signum_and_frame):
        waited = time.monotonic() - began
        if time.thread_time() - computed > seconds or waited > 5 * seconds:
            raise TookTooLong(
                f"your code did not finish in {waited:.0f} s, so it was stopped. Does a loop never "
                "end?"
            )

    handler = signal.signal(signal.SIGALRM, look)
    # Again and again: a bare `except` inside the loop catches the first one.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds / 20, seconds / 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, *timer)
