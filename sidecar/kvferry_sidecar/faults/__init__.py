"""Fault injection, for tests of this project and of other connectors: docs/faults.md.

Nothing of it is built unless the configuration says ``faults.enabled = true``.
"""
