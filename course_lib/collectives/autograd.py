"""Collectives with derivatives."""
