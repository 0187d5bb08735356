"""``ascend-kv eval``: what a cache format costs in quality, many policies on the same tokens.

A *policy* is one way to keep the KV cache. A *task* asks a question of every policy, in *items*
(windows of text, needles, lists). Every (policy, task, item) is a *cell* that is computed once and
kept on disk, so that a run that breaks off goes on where it was; tables and plots are made from
the cells. The method is documented in ``recipes/eval.md``.
"""
