"""Serving side by side: the paper's figures 3 and 4 and table 5 in small."""
