"""Executors: they carry plans out on workers that come and go, through ports that a runtime implements."""
