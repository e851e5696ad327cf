"""The journal of a run: the truth from which everything else is derived again."""
