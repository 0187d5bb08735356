"""The serving engine: requests, scheduler, sampler and the loop that joins them.

``request``, ``batch``, ``scheduler`` and ``stats`` import no torch; ``sampler`` and ``engine`` do.
"""
