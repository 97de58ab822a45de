"""Serving side by side: request traces, and the paper's figures 3 and 4 and table 5 in small."""
