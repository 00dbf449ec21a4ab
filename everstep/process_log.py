"""How our own long-running processes log: one line of key-values for each event, on stderr.

Standard output belongs to answers. Ranks' logs are not this: agents keep them in files.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog


class LossyStream:
    """Loses lines rather than failing.

    A full disk under the log of a process must not stop what the process does.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or lose ``text``."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or lose what is buffered."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure_logging(process: str, *, level: int = logging.INFO) -> None:
    """Set up structlog and the standard library's logging for this process."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(
                key_order=["timestamp", "level", "event"], drop_missing=True
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(
        stream=sys.stderr,
        level=max(level, logging.WARNING),
        format="timestamp='%(asctime)s' level='%(levelname)s' event=%(message)r logger=%(name)s",
    )
    structlog.contextvars.bind_contextvars(process=process)
