"""Reasons and the ledger of outcomes."""
