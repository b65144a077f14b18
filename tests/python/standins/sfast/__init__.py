"""Stands in for stable-fast, which needs a GPU to build: the same names, where it matters."""
