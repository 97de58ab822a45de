"""Webhooks: signed deliveries of a job's status changes, retried until they succeed."""
