"""Notices that a machine will be taken away, from whoever runs it, behind one protocol."""
