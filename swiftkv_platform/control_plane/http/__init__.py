"""HTTP code shared by all routes."""
