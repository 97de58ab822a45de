"""Loops, the leases that elect who runs them, and retention: what is kept for how long."""
