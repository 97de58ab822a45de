"""The loops of a control plane, and the leases that elect who runs them."""
