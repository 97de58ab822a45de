"""Uploaded files that jobs train on."""
