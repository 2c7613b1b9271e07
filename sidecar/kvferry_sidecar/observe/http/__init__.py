"""HTTP for operators, in a thread of its own: probes, metrics, a read-only API and actions."""
