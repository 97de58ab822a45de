"""Retention: rules on what is kept for how long, and the sweeper that removes the rest."""
