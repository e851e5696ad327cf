"""Configurations of other frameworks as settings of PEARL, and one line for each key without a counterpart."""
