"""Engines and their halves: attach, liveness, leases."""
