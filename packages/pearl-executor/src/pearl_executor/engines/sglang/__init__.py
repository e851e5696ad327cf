"""SGLang servers as rollout workers: launch, generation, control, weights. SGLang itself is never imported here.

It runs in an interpreter or container of its own, and is spoken to over HTTP.
"""
