"""Authentication and authorization of callers: tenants, sessions, quotas and the audit trail."""
