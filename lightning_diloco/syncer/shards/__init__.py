"""Processes that share the tensors of a run, so that one machine or memory bus does not limit it.

The syncer decides everything: joins, rounds, leases, the ledger. With S shards, it holds the tensors of the fragments
p with p % S == 0. Shard k is a process that holds the fragments with p % S == k: it receives their contributions,
merges them, logs their outer gradients and serves their updates. Learners exchange a fragment with its shard, and
everything else with the syncer.

A commit of a shard's fragment is durable in two steps. First the shard writes the outer gradient to its own log, then
the syncer writes the decision to the run's log, without the gradient. Only the second step counts. A shard that is
restarted asks the syncer which of its last commits was decided, and drops the others.

A standby has as many shards, and each copies the log of the primary's shard with the same number (`copying.py`).

Source: our choice.
"""
