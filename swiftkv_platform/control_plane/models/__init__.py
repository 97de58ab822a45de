"""Distilled models: lineage, comparison, and the aliases that name those in use."""
