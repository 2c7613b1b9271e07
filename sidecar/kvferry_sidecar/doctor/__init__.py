"""Preflight: what of this machine, this configuration and these engines will not work, and why."""
