"""Callers and what they may do: tenants, sessions, quotas and the audit trail."""
