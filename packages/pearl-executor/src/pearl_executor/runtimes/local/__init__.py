"""The local runtime: real worker processes on one machine, forked from a server that imported the engine once."""
