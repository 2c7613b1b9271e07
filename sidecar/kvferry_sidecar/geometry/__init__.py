"""Validated geometry of what ranks register."""
