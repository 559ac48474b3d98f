"""Collectives built from messages between two ranks: what happens inside an all-reduce."""
