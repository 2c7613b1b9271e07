"""Benches of kvferry: ``python -m bench.run`` runs all, ``python -m bench.NAME`` runs one."""
