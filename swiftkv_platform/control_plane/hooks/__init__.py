"""Webhooks: deliveries of a job's changes, signed and repeated until they arrive."""
