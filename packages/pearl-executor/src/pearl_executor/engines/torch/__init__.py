"""The embedded engine: continuous batching over any Hugging Face causal LM, on CPU and CUDA alike.

`engine` schedules, `model` holds the network, `attention` lets it read and write the paged KV of `pool`, `prefix` keeps
KV across turns, `blob` carries it between workers, `sampling` draws tokens, `weights` reads and verifies snapshots.
"""
