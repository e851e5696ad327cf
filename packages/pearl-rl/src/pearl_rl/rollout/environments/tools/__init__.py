"""Tools: programs that environments run in sandbox processes. Standard library only; each has `run(argument)`."""
