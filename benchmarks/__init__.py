"""Measurements of the claims of the README: everything side by side in one run, as ratios of medians."""
