"""Arithmetic: one folder per operation, a plain reference first and faster equals beside it. Knows jax only."""
