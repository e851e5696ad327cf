"""Workers and training ranks as Ray actors: the local runtime's processes, started and placed by a Ray cluster."""
