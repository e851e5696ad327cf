"""Engines: what runs a language model on one worker."""
