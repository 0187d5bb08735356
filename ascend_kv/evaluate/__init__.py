"""Side-by-side runs that show what a cache format saves and what it costs.

``main_job`` is the one behind ``ascend-kv bench``: schemes under one KV budget, their throughput,
memory and perplexity, and a report.
"""
