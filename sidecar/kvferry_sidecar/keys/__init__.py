"""Namespaces and object keys."""
