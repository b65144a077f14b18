"""Flattening."""
