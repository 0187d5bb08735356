"""What the doctor says about one thing it looked at."""

from __future__ import annotations

from typing import NamedTuple

OK, WARNING, ABSENT, BROKEN = "ok", "warning", "absent", "broken"


class Finding(NamedTuple):
    """One thing that was looked at: ``state`` is OK, WARNING, ABSENT or BROKEN.

    Broken stands in the way, a warning costs speed, and absent is well.
    """

    name: str
    state: str
    value: str
    advice: str = ""
