"""Measurements of the README's claims: all systems side by side in one run, as ratios of medians."""
