"""An engine that computes nothing, for the tests of the bench beside other engines.

Run as a script it serves the protocol, whose folder ``PROTOCOL`` names, prints what engines print
where they should not, and misbehaves as its variant says.
"""

from __future__ import annotations

import os
import sys
import time

sys.path.insert(0, os.environ["PROTOCOL"])

from protocol import Engine, Request, Step, serve

SECONDS_A_TOKEN = 1e-5


def open_engine(request: Request) -> Engine:
    """Refuses, ends, or takes its time by the length of the cache."""
    print("noise on standard output")
    if request.variant == "refuses":
        raise ValueError("no such\ncache")
    if request.variant == "ends":
        os.write(2, b"out of memory\n\n")
        os._exit(7)

    def prefill(token_ids: list[int]) -> Step:
        os.write(1, b"noise from below Python\n")
        length = len(token_ids)

        def step() -> None:
            nonlocal length
            length += 1
            assert length <= request.most_tokens, "the cache is full"
            if request.variant == "ends later" and length > len(token_ids) + 3:
                os._exit(9)
            time.sleep(length * SECONDS_A_TOKEN)

        return step

    threads, path = os.environ["OMP_NUM_THREADS"], os.environ["PATH"].split(os.pathsep)
    loaded = f"{request.model.name}, {request.threads} threads, {threads} of OpenMP, {path[0]}"
    return Engine({"stand-in": "1.0"}, loaded, prefill)


if __name__ == "__main__":
    serve(open_engine)
